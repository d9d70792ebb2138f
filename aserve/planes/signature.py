"""What a collective call says about itself, which parts all ranks must say alike, and failures.

Plain data: text for people, integers for peers in other processes. Nothing here waits.
"""

import zlib
from array import array
from collections.abc import Callable, Sequence

import msgspec
import torch

from aserve.core.layout import GROUPS
from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout, RankDied

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
GROUP_NAMES = tuple(GROUPS)
# Only ever appended to: the places in this table travel between processes.
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
DTYPE_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in DTYPES)
_DTYPE_PLACES = {dtype: place for place, dtype in enumerate(DTYPES)}
# Ranks may differ in the first dimension of these: what each holds is in the counts.
RAGGED = ("all_gather", "all_to_all")


class Signature(msgspec.Struct, frozen=True):
    """One rank's call. `number` counts its calls over one group in one step, from 0.

    `counts` are rows by rank of the group; all_to_all has what is sent, then what is received.
    """

    rank: int
    step: int
    number: int
    op: str
    group: str
    dtype: str
    shape: tuple[int, ...]
    counts: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = (
            f"rank {self.rank} {self.op}#{self.number} of step {self.step} over {self.group} "
            f"{self.dtype} {list(self.shape)}"
        )
        if self.op == "all_to_all":
            n = len(self.counts) // 2
            return f"{text} sends {list(self.counts[:n])} receives {list(self.counts[n:])}"
        return f"{text} counts {list(self.counts)}" if self.counts else text

    def agreed(self) -> tuple[int, ...]:
        """What every rank of the group must say alike, as integers."""
        from_dim = 1 if self.op in RAGGED else 0
        counts = () if self.op == "all_to_all" else self.counts
        return (
            *(self.step, self.number, OPS.index(self.op), GROUP_NAMES.index(self.group)),
            *(DTYPE_NAMES.index(self.dtype), len(self.shape), *self.shape[from_dim:], *counts),
        )

    def own(self) -> tuple[int, ...]:
        """What is this rank's alone; with `agreed` it is the whole call."""
        from_dim = 1 if self.op in RAGGED else 0
        counts = self.counts if self.op == "all_to_all" else ()
        return (self.rank, *self.shape[:from_dim], *counts)


def from_words(agreed: Sequence[int], own: Sequence[int]) -> Signature:
    """The inverse of `agreed` and `own`."""
    step, number, op_place, group, dtype, n_dims, *rest = agreed
    rank, *mine = own
    op = OPS[op_place]
    from_dim = 1 if op in RAGGED else 0
    shape = (*mine[:from_dim], *rest[: n_dims - from_dim])
    counts = mine[from_dim:] if op == "all_to_all" else rest[n_dims - from_dim :]
    name, dtype_name = GROUP_NAMES[group], DTYPE_NAMES[dtype]
    return Signature(rank, step, number, op, name, dtype_name, shape, tuple(counts))


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that no plane carries."""
    place = _DTYPE_PLACES.get(dtype)
    if place is None:
        raise ValueError(f"a layer plane carries {', '.join(DTYPE_NAMES)}, not {dtype}")
    return DTYPE_NAMES[place]


def differ(first: Signature, second: Signature, members: Sequence[int]) -> bool:
    """Whether two ranks of a group made different calls where they should have made the same."""
    if first.agreed() != second.agreed():
        return True
    return first.op == "all_to_all" and pair_counts(first, second, members) != tuple(
        reversed(pair_counts(second, first, members))
    )


def pair_counts(of: Signature, peer: Signature, members: Sequence[int]) -> tuple[int, int]:
    """The rows that `of` says it sends to `peer`, and that it says it receives from it."""
    place = members.index(peer.rank)
    return of.counts[place], of.counts[len(members) + place]


def fold(digest: int, words: Sequence[int]) -> int:
    """32 bits of everything folded in so far, the same on every machine."""
    return zlib.crc32(array("q", words).tobytes(), digest)


class Failure(msgspec.Struct, frozen=True):
    """Why a plane is broken. Each caller gets an error of its own, so tracebacks stay apart."""

    kind: str  # a key of ERRORS
    message: str
    calls: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def error(self) -> PlaneError:
        return ERRORS[self.kind](self)


ERRORS: dict[str, Callable[[Failure], PlaneError]] = {
    "mismatch": lambda failure: PlaneMismatch(*failure.calls),
    "timeout": lambda failure: PlaneTimeout(failure.ranks, failure.message),
    "died": lambda failure: RankDied(failure.ranks[0], failure.message),
    "broken": lambda failure: PlaneError(failure.message),
}


def encode_failure(failure: Failure) -> bytes:
    return msgspec.json.encode(failure)


def decode_failure(text: bytes) -> Failure:
    return msgspec.json.decode(text, type=Failure)


def mismatch(*calls: object) -> Failure:
    return Failure("mismatch", "", calls=tuple(str(call) for call in calls))


def broken(message: str) -> Failure:
    return Failure("broken", message)


def timeout(waiting: str, limit_s: float, missing: Sequence[int], last: Sequence[str]) -> Failure:
    """`last` tells each missing rank's last call."""
    who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {list(missing)} are"
    calls = "; ".join(last)
    message = f"{who} missing: {waiting} waited {limit_s:g} s; last seen: {calls}"
    return Failure("timeout", message, ranks=tuple(missing))


def absent(
    late: Sequence[int], awaited_by: Callable[[int], Sequence[int] | None]
) -> tuple[list[int], list[int]]:
    """Of those who are late, and whom these wait for, and so on: who waits for nobody; and all.

    `awaited_by` says whom a rank waits for, None if it does not wait. In a circle nobody is absent:
    then the late ones are.
    """
    told, found = list(late), []
    for rank in told:
        awaited = awaited_by(rank)
        if awaited is None:
            found.append(rank)
        else:
            told += [peer for peer in awaited if peer not in told]
    return found or list(late), told


def last_seen(rank: int, call: object, waiting: bool) -> str:
    """For people: what a rank called last, and whether it is still in there."""
    if call is None:
        return f"rank {rank} has made no call"
    return f"{call} ({'waiting' if waiting else 'returned'})"
