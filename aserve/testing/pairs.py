"""Pairs of real ends for `aserve.testing.channels`: each plane over each of its transports."""

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import trio

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.core.message import Admit, Batch, Grammar, Result, Sampling, StepPlan, StepReport
from aserve.errors import PeerError, RankDied
from aserve.planes.hidden import HiddenEnd, open_hidden_plane
from aserve.planes.hidden_bundle import Neighbours, Shapes
from aserve.planes.hidden_stream import open_hidden_listener, open_stream_hidden
from aserve.planes.hidden_torch import open_torch_hidden
from aserve.planes.request import FollowerEnd, LeaderEnd
from aserve.planes.request_memory import open_request_plane
from aserve.planes.request_stream import open_follower, open_leader
from aserve.planes.terms import Terms
from aserve.testing.channels import Pair, PlannedDeath
from aserve.testing.far_end import SECRET
from aserve.wire.address import Address, parse_address
from aserve.wire.link import Link

LIMIT_S = 10.0
IN_FLIGHT_MAX = 3
GRID = Grid(Layout(pp=2))
# A stream's writer holds one message more, the kernel as many as its buffers have room for.
STREAM_SLACK = 24


class End:
    """An end held open in a task of its own, so that it can be left at any moment."""

    def __init__(self, opened: AbstractAsyncContextManager[Any]) -> None:
        self._opened = opened
        self._leave = trio.Event()
        self._error: Exception | None = None

    async def run(self, task_status: trio.TaskStatus[Any]) -> None:
        with suppress(PlannedDeath):
            async with self._opened as value:
                task_status.started(value)
                del value
                await self._leave.wait()
                if self._error is not None:
                    raise self._error

    def leave(self, error: Exception | None = None) -> None:
        self._error = self._error or error
        self._leave.set()


def plan_of(number: int, size: int) -> StepPlan:
    sampling = Sampling(seed=number, grammar=Grammar("regex", "x" * size))
    admit = Admit(number, (number,), 1, 0, (), sampling)
    return StepPlan(number, 0, (), (), (), (admit,), (Batch(()),), ())


def report_of(number: int, size: int) -> StepReport:
    result = Result(number, (), (number,), error="x" * size)
    return StepReport(number, 0, number, (result,), (), (), size)


class DownPair:
    """Plans, from the leader to a rank, which reports on each in a task of its own."""

    in_flight_max = IN_FLIGHT_MAX
    slack = 0
    sender, receiver = "the leader", "rank 0"
    on_sender_left: type[Exception] = trio.EndOfChannel
    on_sender_died: type[Exception] = PeerError
    on_receiver_left: type[Exception] = RankDied
    on_receiver_died: type[Exception] = RankDied

    def __init__(self, leader: LeaderEnd, follower: FollowerEnd, ends: tuple[End, End]) -> None:
        self.address: Address = leader.address
        self.settle_s = 0.0
        self.leave_sender, self.leave_receiver = ends[0].leave, ends[1].leave
        self._leader = leader
        self._follower = follower
        self._room = trio.Semaphore(IN_FLIGHT_MAX)
        self._done, self._to_report = trio.open_memory_channel[int](IN_FLIGHT_MAX)

    async def send(self, number: int, size: int) -> None:
        await self._room.acquire()
        self._leader.send_nowait(plan_of(number, size))

    async def receive(self, number: int, size: int) -> None:
        assert await self._follower.plans.receive() == plan_of(number, size)
        self._done.send_nowait(number)

    async def serve(self) -> None:
        with suppress(RankDied, trio.EndOfChannel):
            async for number in self._to_report:
                self._follower.report_nowait(report_of(number, 0))
                assert await self._leader.reports.receive() == report_of(number, 0)
                self._room.release()

    async def hear_of_receiver(self) -> None:
        while True:
            await self._leader.reports.receive()


class UpPair:
    """Reports, from a rank to the leader, each on a plan of its own."""

    in_flight_max = IN_FLIGHT_MAX
    slack = 0
    sender, receiver = "rank 0", "the leader"
    on_sender_left: type[Exception] = RankDied
    on_sender_died: type[Exception] = RankDied
    on_receiver_left: type[Exception] = trio.EndOfChannel
    on_receiver_died: type[Exception] = PeerError

    def __init__(self, leader: LeaderEnd, follower: FollowerEnd, ends: tuple[End, End]) -> None:
        self.address: Address = leader.address
        self.settle_s = 0.0
        self.leave_receiver, self.leave_sender = ends[0].leave, ends[1].leave
        self._leader = leader
        self._follower = follower
        self._room = trio.Semaphore(IN_FLIGHT_MAX)

    async def send(self, number: int, size: int) -> None:
        await self._room.acquire()
        with trio.CancelScope(shield=True):  # or a plan would be left without its report
            self._leader.send_nowait(plan_of(number, 0))
            assert await self._follower.plans.receive() == plan_of(number, 0)
            self._follower.report_nowait(report_of(number, size))

    async def receive(self, number: int, size: int) -> None:
        assert await self._leader.reports.receive() == report_of(number, size)
        self._room.release()

    async def serve(self) -> None:
        """There is nothing to do beside."""

    async def hear_of_receiver(self) -> None:
        while True:
            await self._follower.plans.receive()


class HiddenPair:
    """Bundles, from a stage to the next."""

    in_flight_max = IN_FLIGHT_MAX
    sender, receiver = "rank 0", "rank 1"
    on_sender_left: type[Exception] = RankDied
    on_sender_died: type[Exception] = RankDied
    on_receiver_left: type[Exception] = RankDied
    on_receiver_died: type[Exception] = RankDied

    def __init__(
        self, first: HiddenEnd, second: HiddenEnd, ends: tuple[End, End], slack: int = 0
    ) -> None:
        self.first = first
        self.second = second
        self.slack = slack
        self.settle_s = 0.0
        self.address: Address | None = None
        self.leave_sender, self.leave_receiver = ends[0].leave, ends[1].leave

    async def send(self, number: int, size: int) -> None:
        await self.first.send(number, bundle_of(number, size))

    async def receive(self, number: int, size: int) -> None:
        bundle = await self.second.receive(number, shapes_of_size(size))
        expected = bundle_of(number, size)
        assert bundle.keys() == expected.keys(), list(bundle)
        assert all(torch.equal(bundle[name], expected[name]) for name in expected), number

    async def hear_of_receiver(self) -> None:
        for number in itertools.count(1000):
            await self.send(number, 1)


def bundle_of(number: int, size: int) -> dict[str, torch.Tensor]:
    hidden = torch.arange(number, number + size).to(torch.uint8).view(size, 1)
    return {"hidden": hidden, "aux.3": torch.full((2, 1), number, dtype=torch.bfloat16)}


def shapes_of_size(size: int) -> Shapes:
    return {"aux.3": ((2, 1), torch.bfloat16), "hidden": ((size, 1), torch.uint8)}


@asynccontextmanager
async def memory_request(
    kind: type[DownPair] | type[UpPair], *, encoded: bool = False, link: Link | None = None
) -> AsyncIterator[Pair]:
    async with trio.open_nursery() as nursery:
        leading = End(open_request_plane(1, IN_FLIGHT_MAX, encoded=encoded, link=link))
        leader, (follower,) = await nursery.start(leading.run)
        following = End(follower)
        await nursery.start(following.run)
        async with _served(kind(leader, follower, (leading, following))) as pair:
            pair.settle_s = 0.0 if link is None else 1.0
            yield pair


@asynccontextmanager
async def stream_request(kind: type[DownPair] | type[UpPair], address: str) -> AsyncIterator[Pair]:
    terms = Terms(1, IN_FLIGHT_MAX, SECRET)
    async with trio.open_nursery() as nursery:
        leading = End(open_leader(parse_address(address), terms))
        leader = await nursery.start(leading.run)
        following = End(open_follower(leader.address, terms, 0, limit_s=LIMIT_S))
        follower = await nursery.start(following.run)
        await leader.wait_joined(LIMIT_S)
        async with _served(kind(leader, follower, (leading, following))) as pair:
            yield pair


@asynccontextmanager
async def _served(pair: DownPair | UpPair) -> AsyncIterator[DownPair | UpPair]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair.serve)
        yield pair
        pair.leave_receiver()
        pair.leave_sender()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def memory_hidden(
    *, limit_s: float = LIMIT_S, link: Link | None = None
) -> AsyncIterator[HiddenPair]:
    async with (
        open_hidden_plane(GRID, IN_FLIGHT_MAX, limit_s=limit_s, link=link) as ends,
        trio.open_nursery() as nursery,
    ):
        held = End(ends[0]), End(ends[1])
        for end in held:
            await nursery.start(end.run)
        yield HiddenPair(ends[0], ends[1], held, slack=0 if link is None else 2)
        for end in held:
            end.leave()


@asynccontextmanager
async def stream_hidden(address: str, *, limit_s: float = LIMIT_S) -> AsyncIterator[HiddenPair]:
    terms = Terms(2, IN_FLIGHT_MAX, SECRET)
    first, second = Neighbours.of(GRID, 0), Neighbours.of(GRID, 1)
    async with AsyncExitStack() as stack:
        listener = await stack.enter_async_context(
            open_hidden_listener(parse_address(address), terms, second)
        )
        sending = open_stream_hidden(
            first, terms, listener=None, following=listener.address, limit_s=limit_s
        )
        receiving = open_stream_hidden(
            second, terms, listener=listener, following=None, limit_s=limit_s
        )
        pair = await stack.enter_async_context(_both(sending, receiving, STREAM_SLACK))
        pair.address = listener.address
        yield pair


@asynccontextmanager
async def torch_hidden(*, limit_s: float = LIMIT_S) -> AsyncIterator[HiddenPair]:
    store = dist.HashStore()
    sending, receiving = (
        open_torch_hidden(
            Neighbours.of(GRID, rank),
            store,
            in_flight_max=IN_FLIGHT_MAX,
            limit_s=limit_s,
            host="127.0.0.1",
        )
        for rank in (0, 1)
    )
    async with _both(sending, receiving, 0) as pair:
        yield pair


def file_store(folder: str) -> dist.Store:
    """For two processes that share a folder and nothing else."""
    return dist.FileStore(os.path.join(folder, "store"), GRID.world)


@asynccontextmanager
async def _both(
    sending: AbstractAsyncContextManager[HiddenEnd],
    receiving: AbstractAsyncContextManager[HiddenEnd],
    slack: int,
) -> AsyncIterator[HiddenPair]:
    """Each end waits for the other before it is open."""
    held = End(sending), End(receiving)
    found: dict[int, HiddenEnd] = {}
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as opening:

            async def start(number: int) -> None:
                found[number] = await nursery.start(held[number].run)

            opening.start_soon(start, 0)
            opening.start_soon(start, 1)
        yield HiddenPair(found[0], found[1], held, slack)
        for end in held:
            end.leave()
