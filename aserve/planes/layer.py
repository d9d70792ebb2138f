"""One rank's end of its stage's collectives, over any transport; and the one between threads.

A `LayerEnd` checks what can be checked alone, names each call and hands it to its transport. It
knows who its peers are and nothing of how to reach them.
"""

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from aserve.core.layout import GROUPS, Grid
from aserve.errors import PlaneError
from aserve.planes import board, signature
from aserve.planes.board import Board, Call, Meeting
from aserve.planes.signature import Failure, Signature
from aserve.tensor.collective import Collective, OneRank


class Transport(Protocol):
    """How one rank meets its peers. After a failure all but `fail`, `close` and `last_call` raise
    it."""

    def start(self, step: int) -> None: ...
    def meet(self, call: Call) -> Tensor:
        """Take part in a call; may wait. Raises PlaneError."""
        ...

    def fail(self, failure: Failure) -> None:
        """Break the plane for the whole stage at once, from any thread; the first one stays."""
        ...

    def last_call(self) -> str: ...
    def close(self) -> None: ...


class LayerEnd:
    """The LayerPlane of one rank; `async with` it, or call `close`. Closing breaks what peers wait
    for.

    Only `abort`, `last_call` and `close` may be called from another thread than the forward's.
    """

    def __init__(self, grid: Grid, rank: int, transport: Transport) -> None:
        self.rank = rank
        self._transport = transport
        self._closed = False
        # Names for the same ranks share nothing but their members: each counts its own calls.
        self._groups = {name: self._end(name, grid.group(name, rank)) for name in GROUPS}

    def _end(self, name: str, members: tuple[int, ...]) -> "GroupEnd | OneRank":
        if len(members) == 1:
            return OneRank()
        return GroupEnd(name, members, self.rank, self._transport)

    def start(self, step: int) -> None:
        """Raises PlaneError if the plane is broken."""
        assert step >= 0, step
        for group in self._groups.values():
            if isinstance(group, GroupEnd):
                group.start(step)
        self._transport.start(step)

    def group(self, name: str) -> Collective:
        return self._groups[name]

    @property
    def last_call(self) -> str:
        """For doctor: the last collective, its step, and whether the rank is still in it."""
        return self._transport.last_call()

    def abort(self, reason: str) -> None:
        """Whoever waits in this stage, or calls from now on, gets a PlaneError with this reason."""
        self._transport.fail(signature.broken(reason))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._transport.fail(signature.broken(f"rank {self.rank} closed its layer plane"))
            self._transport.close()

    async def __aenter__(self) -> "LayerEnd":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class GroupEnd:
    """A Collective of two ranks or more."""

    def __init__(
        self, name: str, members: tuple[int, ...], rank: int, transport: Transport
    ) -> None:
        self._name = name
        self._members = members
        self._global_rank = rank
        self._transport = transport
        self._step = -1
        self._number = 0
        self.rank = members.index(rank)
        self.size = len(members)

    def start(self, step: int) -> None:
        self._step = step
        self._number = 0

    def all_reduce(self, parts_B: Tensor) -> Tensor:
        _check_sum(parts_B, 1)
        return self._call("all_reduce", parts_B, ())

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        counts = self._counts("counts", counts)
        _check_rows(x, 0, counts[self.rank])
        return self._call("all_gather", x, counts)

    def reduce_scatter(self, parts_B: Tensor, counts: Sequence[int]) -> Tensor:
        counts = self._counts("counts", counts)
        _check_sum(parts_B, 2)
        _check_rows(parts_B, 1, sum(counts))
        return self._call("reduce_scatter", parts_B, counts)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        send_counts = self._counts("send_counts", send_counts)
        receive_counts = self._counts("receive_counts", receive_counts)
        _check_rows(x, 0, sum(send_counts))
        if send_counts[self.rank] != receive_counts[self.rank]:
            raise ValueError(
                f"sends {send_counts[self.rank]} rows to itself, "
                f"receives {receive_counts[self.rank]} of them"
            )
        return self._call("all_to_all", x, (*send_counts, *receive_counts))

    def _call(self, op: str, tensor: Tensor, counts: tuple[int, ...]) -> Tensor:
        assert self._step >= 0, "start(step) comes before any call"
        dtype = signature.dtype_name(tensor.dtype)
        number, self._number = self._number, self._number + 1
        shape = tuple(tensor.shape)
        called = Signature(
            self._global_rank, self._step, number, op, self._name, dtype, shape, counts
        )
        return self._transport.meet(Call(called, self._members, tensor.contiguous()))

    def _counts(self, what: str, counts: Sequence[int]) -> tuple[int, ...]:
        if len(counts) != self.size:
            raise ValueError(f"{len(counts)} {what} for a group of {self.size} ranks")
        if min(counts) < 0:
            raise ValueError(f"{what} {list(counts)}: a count is at least 0")
        return tuple(counts)


def _check_sum(parts_B: Tensor, dims_min: int) -> None:
    if parts_B.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"sums are taken in float32 or float64, not {parts_B.dtype}")
    if parts_B.dim() < dims_min or parts_B.shape[0] < 1:
        raise ValueError(f"{list(parts_B.shape)} holds no blocks to sum")


def _check_rows(x: Tensor, dim: int, n_rows: int) -> None:
    if x.dim() <= dim or x.shape[dim] != n_rows:
        raise ValueError(f"counts say {n_rows} rows, the tensor is {list(x.shape)}")


class ThreadBoard:
    """A stage's board under one lock; each group sleeps on a condition of its own."""

    def __init__(self, limit_s: float) -> None:
        self._board = Board()
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._conditions: dict[tuple[int, ...], threading.Condition] = {}

    def check(self) -> None:
        with self._lock:
            self._board.check()

    def meet(self, call: Call) -> Tensor:
        with self._lock:
            meeting = self._post(call)
            if waits := bool(meeting.missing):
                self._wait(meeting, call.signature)
        if not waits:
            self._complete(meeting, call.signature)
        assert meeting.results is not None
        return board.share(meeting.results, call)

    def _post(self, call: Call) -> Meeting:
        try:
            return self._board.post(call)
        except PlaneError:
            self._wake_all()
            raise

    def _wait(self, meeting: Meeting, waiting: Signature) -> None:
        condition = self._condition(meeting.members)
        deadline_s = time.monotonic() + self._limit_s
        while meeting.results is None:
            self._board.check()
            # Once all have come there is no limit: the last one is computing.
            left_s = deadline_s - time.monotonic() if meeting.missing else None
            if left_s is not None and left_s <= 0:
                self._board.time_out(meeting, waiting, self._limit_s)
                self._wake_all()
            else:
                condition.wait(left_s)

    def _complete(self, meeting: Meeting, last: Signature) -> None:
        try:
            results = board.combined(meeting)
        except BaseException as error:
            self.fail(signature.broken(f"{last} could not be computed: {error!r}"))
            raise
        with self._lock:
            self._board.check()  # who was told of a failure no longer stands by its tensor
            meeting.results = results
            self._condition(meeting.members).notify_all()

    def _condition(self, members: tuple[int, ...]) -> threading.Condition:
        if members not in self._conditions:
            self._conditions[members] = threading.Condition(self._lock)
        return self._conditions[members]

    def _wake_all(self) -> None:
        for condition in self._conditions.values():
            condition.notify_all()

    def fail(self, failure: Failure) -> None:
        with self._lock:
            self._board.fail(failure)
            self._wake_all()

    def last_call(self, rank: int) -> str:
        with self._lock:
            return self._board.last_call(rank)


class BoardTransport:
    """A rank's way to a board that the ranks of its stage share in one process."""

    def __init__(self, shared: "SharedBoard", rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self.meet = shared.meet
        self.fail = shared.fail

    def start(self, step: int) -> None:
        self._shared.check()

    def last_call(self) -> str:
        return self._shared.last_call(self._rank)

    def close(self) -> None:
        """The board goes with the last rank that knows it."""


class Alone:
    """The transport of a rank without peers, which has nobody to call."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure: Failure | None = None

    def start(self, step: int) -> None:
        if self._failure is not None:
            raise self._failure.error()

    def meet(self, call: Call) -> Tensor:
        raise AssertionError(f"{call.signature} has nobody to meet")

    def fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure

    def last_call(self) -> str:
        return signature.last_seen(self._rank, None, False)

    def close(self) -> None:
        """There is nothing to give back."""


class SharedBoard(Protocol):
    def check(self) -> None: ...
    def meet(self, call: Call) -> Tensor: ...
    def fail(self, failure: Failure) -> None: ...
    def last_call(self, rank: int) -> str: ...


def planes_on_boards(grid: Grid, boards: Sequence[SharedBoard]) -> dict[int, LayerEnd]:
    """An end for each rank of the grid, given a board for each stage."""
    return {
        rank: LayerEnd(grid, rank, BoardTransport(boards[rank // grid.tp], rank))
        for rank in range(grid.world)
    }


def open_thread_planes(grid: Grid, *, limit_s: float) -> dict[int, LayerEnd]:
    """Ends for ranks that are threads of this process: each is used by one thread at a time.

    A call that waits longer than `limit_s` seconds for a rank raises PlaneTimeout on all.
    """
    return planes_on_boards(grid, [ThreadBoard(limit_s) for _ in range(grid.pp)])
