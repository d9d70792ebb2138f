"""The layer plane over torch.distributed: between hosts, or where shared memory is not to be had.

Every op is a round of messages between members (torch_exchange), and sums are taken here, in rank
order: gloo's own order is not promised. Who failed to come, and what it did instead, is told by a
store: each rank's watch keeps the rank's last call there, also while its forward is stuck.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from aserve.core.layout import Grid
from aserve.errors import PlaneTimeout
from aserve.planes import signature
from aserve.planes.board import Call, in_rank_order, sum_in_order
from aserve.planes.layer import Alone, LayerEnd
from aserve.planes.signature import Failure, Signature
from aserve.planes.torch_exchange import (
    AllToAllExchange,
    Exchange,
    GlooExchange,
    Network,
    check_backend,
)
from aserve.planes.torch_watch import Watch

# A sum of more than this many bytes a rank is taken in shares, each by one rank, then gathered.
SHARED_SUM_BYTES = 256 << 10
NOTE_BYTES = 1024  # of what ranks write to each other about their calls, beside what grows with n
NOTE_BYTES_A_RANK = 128


class Note(msgspec.Struct, frozen=True):
    """What a rank says of a call before it, or of all its calls of a step after them."""

    call: Signature | None = None
    step: int = 0
    last: str = ""
    digests: dict[str, int] = {}


class TorchTransport:
    """One rank's messages to its stage."""

    def __init__(self, grid: Grid, rank: int, exchange: Exchange, watch: Watch, check: str) -> None:
        first = rank // grid.tp * grid.tp
        self._rank = rank
        self._stage = tuple(range(first, first + grid.tp))
        self._exchange = exchange
        self._watch = watch
        self._checks_calls = check == "call"
        self._checks_steps = not (self._checks_calls or exchange.tagged)
        # Over each group: notes sent, a key on which ranks agree whatever they call; what they
        # called since the last check.
        self._notes: dict[tuple[int, ...], int] = {}
        self._digests: dict[str, int] = {}

    def start(self, step: int) -> None:
        self._watch.check()
        if self._checks_steps:
            # A call of its own kind, for the watch to name.
            number = self._notes.get(self._stage, 0)
            named = Signature(self._rank, step, number, "all_gather", "tp", "uint8", ())
            compare = partial(self._compare_steps, self._watch.last_call())
            self._guarded(Call(named, self._stage, torch.empty(0)), compare)

    def meet(self, call: Call) -> Tensor:
        self._watch.check()
        return self._guarded(call, self._run)

    def _guarded(self, call: Call, run: Callable[[Call], Tensor]) -> Tensor:
        self._watch.entered(call.signature)
        since_s = time.monotonic()
        try:
            result = run(call)
        except RuntimeError as error:  # gloo's errors have no type of their own
            text, waited_s = str(error).partition("\n")[0], time.monotonic() - since_s
            self._watch.explain(call, text, waited_s)
            self._watch.check()
            raise
        self._watch.returned()
        return result

    def _run(self, call: Call) -> Tensor:
        agreed = call.signature.agreed()
        if self._checks_calls:
            self._compare_calls(call)
        elif self._checks_steps:
            group = ",".join(map(str, call.members))
            self._digests[group] = signature.fold(self._digests.get(group, 0), agreed)
        return _OPS[call.signature.op](Round(self._exchange, call, signature.fold(0, agreed)))

    def _compare_calls(self, call: Call) -> None:
        """Before any data moves. Raises PlaneMismatch."""
        for _, note in self._exchanged(call.members, Note(call.signature)):
            assert note.call is not None
            if signature.differ(call.signature, note.call, call.members):
                both = in_rank_order(call.signature, note.call)
                self._watch.fail(signature.mismatch(*both))
                self._watch.check()

    def _compare_steps(self, last: str, call: Call) -> Tensor:
        """The step that begins, and all calls since the last one. Raises PlaneMismatch."""
        step, digests, self._digests = call.signature.step, self._digests, {}
        mine = Note(None, step, f"rank {self._rank} at step {step} after: {last}", digests)
        for rank, note in self._exchanged(self._stage, mine):
            met = [key for key in {**digests, **note.digests} if str(rank) in key.split(",")]
            met = [key for key in met if str(self._rank) in key.split(",")]
            same = all(digests.get(key, 0) == note.digests.get(key, 0) for key in met)
            if not same or note.step != step:
                both = sorted([(self._rank, mine.last), (rank, note.last)])
                self._watch.fail(signature.mismatch(*(text for _, text in both)))
                self._watch.check()
        return call.tensor

    def _exchanged(self, members: tuple[int, ...], note: Note) -> list[tuple[int, Note]]:
        """The others' notes. They have one size, so whatever is called they reach each other."""
        number = self._notes[members] = self._notes.get(members, 0) + 1
        size = NOTE_BYTES + NOTE_BYTES_A_RANK * len(self._stage)
        text = msgspec.json.encode(note).ljust(size)
        assert len(text) == size, "a note is too long"
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        notes = [mine if rank == self._rank else torch.empty_like(mine) for rank in members]
        key = signature.fold(0, (-1, *members, number))
        self._exchange.move(members, key, [mine] * len(members), notes)
        return [
            (rank, msgspec.json.decode(bytes(written.tolist()), type=Note))
            for rank, written in zip(members, notes, strict=True)
            if rank != self._rank
        ]

    def fail(self, failure: Failure) -> None:
        self._watch.fail(failure)

    def last_call(self) -> str:
        return self._watch.last_call()

    def close(self) -> None:
        self._watch.close()


class Round:
    """The moves of one call: each has a key of its own, and what stays here is not moved."""

    def __init__(self, exchange: Exchange, call: Call, key: int) -> None:
        self.call = call
        self.place = call.place
        self.n = len(call.members)
        self._exchange = exchange
        self._key = key

    def move(self, give: Sequence[Tensor], get: Sequence[Tensor]) -> None:
        self._key = signature.fold(self._key, (1,))
        self._exchange.move(self.call.members, self._key, give, get)

    def join(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        out = x.new_empty((sum(counts), *x.shape[1:]))
        pieces = out.split_with_sizes(list(counts))
        pieces[self.place].copy_(x)
        self.move([x] * self.n, pieces)
        return out

    def sum_rows(self, parts_B: Tensor, counts: Sequence[int]) -> Tensor:
        """[B, sum(counts), ...] -> [counts[place], ...]"""
        give = [piece.contiguous() for piece in parts_B.split_with_sizes(list(counts), dim=1)]
        return self._sum(give, give[self.place])

    def sum_all(self, parts_B: Tensor) -> Tensor:
        return self._sum([parts_B] * self.n, parts_B)

    def _sum(self, give: Sequence[Tensor], mine: Tensor) -> Tensor:
        got = [mine if at == self.place else torch.empty_like(mine) for at in range(self.n)]
        self.move(give, got)
        return sum_in_order(block for parts in got for block in parts)


def _all_reduce(of: Round) -> Tensor:
    parts = of.call.tensor
    if of.n == 2 or parts.nbytes <= SHARED_SUM_BYTES:
        return of.sum_all(parts)
    flat = parts.view(len(parts), -1)
    least, more = divmod(flat.shape[1], of.n)
    counts = [least + (place < more) for place in range(of.n)]
    return of.join(of.sum_rows(flat, counts), counts).view(parts.shape[1:])


def _all_gather(of: Round) -> Tensor:
    return of.join(of.call.tensor, of.call.signature.counts)


def _reduce_scatter(of: Round) -> Tensor:
    return of.sum_rows(of.call.tensor, of.call.signature.counts)


def _all_to_all(of: Round) -> Tensor:
    x, counts = of.call.tensor, of.call.signature.counts
    sends, receives = list(counts[: of.n]), list(counts[of.n :])
    out = x.new_empty((sum(receives), *x.shape[1:]))
    give, get = x.split_with_sizes(sends), out.split_with_sizes(receives)
    get[of.place].copy_(give[of.place])
    of.move(give, get)
    return out


_OPS: dict[str, Callable[[Round], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def open_torch_plane(
    grid: Grid,
    rank: int,
    network: Network,
    *,
    limit_s: float,
    check: Literal["step", "call"] = "step",
) -> LayerEnd:
    """This rank's end; waits for the other ranks of its stage, so call it off the trio thread.

    `network.store` is one that all ranks reach and no other start of the grid used, such as
    `PrefixStore(str(start), TCPStore(...))`; a default process group is neither needed nor made.
    Different calls are told at once with check="call", which costs each call another message.
    Without, over gloo, ranks that call differently wait for each other to the limit and are then
    told the same; other backends compare digests of all calls as a step starts. `wait` of NCCL and
    its errors are its own: it was never tried here.

    Raises PlaneTimeout naming ranks that did not come within `limit_s`, ConfigError for a backend
    that torch lacks.
    """
    assert 0 <= rank < grid.world, (rank, grid.world)
    if grid.tp == 1:
        return LayerEnd(grid, rank, Alone(rank))
    first = rank // grid.tp * grid.tp
    stage = range(first, first + grid.tp)
    store = PrefixStore(f"layer/{first}", network.store)
    store.set(f"here/{rank}", "")
    check_backend(network.backend)
    open_exchange = GlooExchange if network.backend == "gloo" else AllToAllExchange
    try:
        exchange = open_exchange(network._replace(store=store), stage, rank, limit_s)
    except RuntimeError as error:
        missing = [peer for peer in stage if not store.check([f"here/{peer}"])]
        text = str(error).partition("\n")[0]
        who = f"ranks {missing} did not come" if missing else "all ranks came"
        raise PlaneTimeout(missing, f"rank {rank} opening its layer plane: {who}: {text}") from None
    watch = Watch(grid, rank, store, exchange, limit_s)
    return LayerEnd(grid, rank, TorchTransport(grid, rank, exchange, watch, check))
