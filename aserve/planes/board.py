"""The pure rendezvous of one stage's ranks: who called what, what does not match, who is missing.

No waiting, no clock, no I/O: a transport (threads, greenlets) posts calls and does the waiting.
The rank that comes last computes for all of them while the others still stand by their tensors, so
nobody copies an input and nobody waits twice.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from aserve.planes import signature
from aserve.planes.signature import Failure, Signature


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """A signature with the tensor it is about and the global ranks that meet in it, in order."""

    signature: Signature
    members: tuple[int, ...]
    tensor: Tensor

    @property
    def place(self) -> int:
        return self.members.index(self.signature.rank)


@dataclasses.dataclass(eq=False, slots=True)
class Meeting:
    """The calls of one group that belong together, by rank."""

    members: tuple[int, ...]
    calls: dict[int, Call] = dataclasses.field(default_factory=dict)
    results: list[Tensor] | None = None  # set once, by the rank that came last

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.members if rank not in self.calls)

    def in_order(self) -> list[Call]:
        return [self.calls[rank] for rank in self.members]


class Board:
    """The open meetings of a stage. A rank is in one call at a time.

    Groups are known by their members, so two names for the same ranks meet (and do not match).
    After a failure every post raises it.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.open: dict[tuple[int, ...], Meeting] = {}
        self._last: dict[int, Signature] = {}

    def post(self, call: Call) -> Meeting:
        """The call's meeting, complete or not. Raises PlaneError, PlaneMismatch among them."""
        self.check()
        rank = call.signature.rank
        self._last[rank] = call.signature
        meeting = self.open.get(call.members) or Meeting(call.members)
        assert rank not in meeting.calls, f"rank {rank} is in a call already"
        other = self._different(call, meeting)
        if other is not None:
            self.fail(signature.mismatch(*in_rank_order(other, call.signature)))
            self.check()
        meeting.calls[rank] = call
        if meeting.missing:
            self.open[call.members] = meeting
        else:
            self.open.pop(call.members, None)
        return meeting

    def _different(self, call: Call, meeting: Meeting) -> Signature | None:
        """A call that can never meet this one, of this group or of one that waits for this rank."""
        for met in meeting.calls.values():
            if signature.differ(met.signature, call.signature, call.members):
                return met.signature
        rank = call.signature.rank
        for elsewhere in self.open.values():
            if rank in elsewhere.members and elsewhere is not meeting:
                for met in elsewhere.calls.values():
                    if met.signature.rank in call.members:
                        return met.signature
        return None

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure.error()

    def fail(self, failure: Failure) -> None:
        """The first failure stays."""
        if self.failure is None:
            self.failure = failure

    def time_out(self, meeting: Meeting, waiting: Signature, limit_s: float) -> None:
        """Somebody waited long enough. Nothing happens if all came in the meantime."""
        if meeting.missing:
            missing, told = signature.absent(meeting.missing, self._awaited_by)
            last = [self.last_call(rank) for rank in told]
            self.fail(signature.timeout(str(waiting), limit_s, missing, last))

    def _awaited_by(self, rank: int) -> tuple[int, ...] | None:
        waits = [meeting for meeting in self.open.values() if rank in meeting.calls]
        return waits[0].missing if waits else None

    def last_call(self, rank: int) -> str:
        waiting = self._awaited_by(rank) is not None
        return signature.last_seen(rank, self._last.get(rank), waiting)


def in_rank_order(first: Signature, second: Signature) -> tuple[Signature, Signature]:
    return (first, second) if first.rank <= second.rank else (second, first)


def combined(meeting: Meeting) -> list[Tensor]:
    """What the calls amount to for each member, in memory no caller has; take it by `share`."""
    calls = meeting.in_order()
    return _COMBINE[calls[0].signature.op](calls)


def share(results: list[Tensor], call: Call) -> Tensor:
    """A rank's result as its own: what all get alike is copied, by all takers side by side."""
    result = results[call.place]
    alike = call.signature.op in ("all_reduce", "all_gather")
    return result.clone() if alike else result


def sum_in_order(blocks: Iterable[Tensor]) -> Tensor:
    """((p0 + p1) + p2) + ... in memory of its own."""
    rest = iter(blocks)
    total = next(rest).clone()
    for block in rest:
        total += block
    return total


def _all_reduce(calls: Sequence[Call]) -> list[Tensor]:
    total = sum_in_order(block for call in calls for block in call.tensor)
    return [total] * len(calls)


def _all_gather(calls: Sequence[Call]) -> list[Tensor]:
    return [torch.cat([call.tensor for call in calls])] * len(calls)


def _reduce_scatter(calls: Sequence[Call]) -> list[Tensor]:
    """Slices of one sum: no two ranks have a row in common."""
    return list(_all_reduce(calls)[0].split_with_sizes(calls[0].signature.counts))


def _all_to_all(calls: Sequence[Call]) -> list[Tensor]:
    n = len(calls)
    pieces = [call.tensor.split_with_sizes(call.signature.counts[:n]) for call in calls]
    return [torch.cat([given[place] for given in pieces]) for place in range(n)]


_COMBINE: dict[str, Callable[[Sequence[Call]], list[Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
