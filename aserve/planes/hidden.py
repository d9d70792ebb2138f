"""The hidden plane: what a stage computed goes to the next, rank by rank, and nowhere else.

A rank of a stage talks to its like in the stage before and after. Names, shapes and dtypes follow
from the plan on both sides, so no description travels with the data, only what shows that both mean
the same. Here: the ends, and the plane inside one process; `hidden_stream` and `hidden_torch` go
between processes.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Protocol

import trio
from torch import Tensor

from aserve.core.layout import Grid
from aserve.errors import PeerError
from aserve.planes.hidden_bundle import (
    Neighbours,
    Shapes,
    Waits,
    allocated,
    described,
    died,
    n_bytes,
    shapes_of,
)
from aserve.planes.request import last_words
from aserve.wire.link import Hop, Link
from aserve.wire.nursery import ServiceNursery


class HiddenEnd(Protocol):
    """One rank's end. Steps go in order; at most `in_flight_max` bundles wait to be received.

    Where ranks do not meet it raises a PlaneError: PlaneMismatch where the other is at another
    step or has other shapes, PlaneTimeout where it did not come, RankDied where it is gone; and
    after `abort` or any of these, always. Both calls may be cancelled and made again.
    """

    @property
    def has_previous(self) -> bool: ...

    @property
    def has_next(self) -> bool: ...

    async def receive(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        """The bundle of this step from the stage before; the tensors are the caller's.

        A bundle without a single element is not sent, so it is here at once.
        """
        ...

    async def send(self, step: int, bundle: Mapping[str, Tensor]) -> None:
        """Hand the bundle over: the caller gives its tensors up. Waits while too many wait."""
        ...

    def abort(self, reason: str) -> None:
        """From any thread: whoever waits here, now or later, gets a PlaneError."""
        ...


class OnlyStage:
    """The end of a rank whose stage holds every layer: there is nobody to talk to."""

    has_previous = False
    has_next = False

    async def receive(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        raise AssertionError("a first stage receives nothing")

    async def send(self, step: int, bundle: Mapping[str, Tensor]) -> None:
        raise AssertionError("a last stage sends nothing")

    def abort(self, reason: str) -> None:
        """Nobody waits."""


class _Pipe:
    """From one rank to its next: tensors as they are, handed over."""

    def __init__(self, bundles_max: int) -> None:
        channel = trio.open_memory_channel[tuple[int, Mapping[str, Tensor]]](bundles_max)
        self.sender, self.receiver = channel
        self.taken = self.receiver  # what the next rank receives from; a link stands between
        self.left = "it left"  # what the end that closed said

    def insert(self, link: Link, hop: Hop, nursery: trio.Nursery) -> None:
        onward, self.taken = trio.open_memory_channel[tuple[int, Mapping[str, Tensor]]](0)
        nursery.start_soon(self._pump, link, hop, onward)

    async def _pump(
        self, link: Link, hop: Hop, onward: trio.MemorySendChannel[tuple[int, Mapping[str, Tensor]]]
    ) -> None:
        with self.receiver, onward:
            async for item in self.receiver:
                try:
                    await link(hop)
                    await onward.send(item)
                except PeerError as error:
                    self.left = str(error)
                    return
                except trio.BrokenResourceError:
                    return


class MemoryEnd:
    """A HiddenEnd among ranks of one process. As a context manager it leaves when its rank does:
    the ranks beside it then get RankDied instead of waiting out the limit."""

    def __init__(
        self, beside: Neighbours, previous: _Pipe | None, following: _Pipe | None, limit_s: float
    ) -> None:
        self.has_previous = previous is not None
        self.has_next = following is not None
        self._beside = beside
        self._previous = previous
        self._next = following
        self._waits = Waits(limit_s)

    async def receive(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        assert self._previous is not None, "a first stage receives nothing"
        if n_bytes(shapes) == 0:
            self._waits.check()
            await trio.lowlevel.checkpoint()
            return allocated(shapes)
        try:
            late = partial(self._beside.late_sender, step, self._waits.limit_s)
            sent_step, bundle = await self._waits.wait(self._previous.taken.receive, late)
        except trio.EndOfChannel:
            self._waits.fail(died(self._beside.previous, self._previous.left))
            self._waits.check()
            raise
        sent = shapes_of(bundle)
        if sent_step != step or described(sent) != described(shapes):
            came = f"step {sent_step} ({described(sent)})"
            self._waits.fail(partial(self._beside.mismatch, step, shapes, came))
            self._waits.check()
        return dict(bundle)

    async def send(self, step: int, bundle: Mapping[str, Tensor]) -> None:
        assert self._next is not None, "a last stage sends nothing"
        if n_bytes(shapes_of(bundle)) == 0:
            self._waits.check()
            await trio.lowlevel.checkpoint()
            return
        try:
            late = partial(self._beside.late_receiver, step, self._waits.limit_s)
            await self._waits.wait(partial(self._next.sender.send, (step, bundle)), late)
        except trio.BrokenResourceError:
            self._waits.fail(died(self._beside.next, self._next.left))
            self._waits.check()
            raise

    def abort(self, reason: str) -> None:
        self._waits.abort(reason)

    def leave(self, error: str = "") -> None:
        """What was sent can still be received; nothing more comes, and nothing is taken."""
        self._waits.abort("this rank has left")
        why = error or "it left"
        if self._previous is not None:
            self._previous.left = why
            self._previous.taken.close()
        if self._next is not None:
            self._next.left = why
            self._next.sender.close()

    async def __aenter__(self) -> "MemoryEnd":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(last_words(error))


@asynccontextmanager
async def open_hidden_plane(
    grid: Grid, in_flight_max: int, *, limit_s: float, link: Link | None = None
) -> AsyncIterator[tuple[MemoryEnd, ...]]:
    """The ends of all ranks of this process, by rank. `link` is awaited before each delivery, in a
    task a pair of ranks."""
    pipes: dict[int, _Pipe] = {}  # by the rank that receives
    async with ServiceNursery() as nursery:
        for rank in range(grid.tp, grid.world):
            pipes[rank] = _Pipe(in_flight_max)
            if link is not None:
                pipes[rank].insert(link, Hop("hidden", rank - grid.tp, rank), nursery)
        ends = tuple(
            MemoryEnd(
                Neighbours.of(grid, rank), pipes.get(rank), pipes.get(rank + grid.tp), limit_s
            )
            for rank in range(grid.world)
        )
        try:
            yield ends
        finally:
            for end in ends:
                end.leave("the plane was closed")
