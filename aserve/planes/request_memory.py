"""The request plane inside one process: messages are handed over as they are, without tasks."""

from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias

import trio

from aserve.core.codec import Down, Up, decode_down, decode_up, encode
from aserve.core.message import End
from aserve.errors import PeerError
from aserve.planes.request import CONTROLS_MAX, LEAVE_S, FollowerEnd, LeaderEnd, last_words
from aserve.wire.address import Memory
from aserve.wire.hello import LEADER
from aserve.wire.link import Hop, Link
from aserve.wire.nursery import ServiceNursery

_Deliver: TypeAlias = Callable[..., None]


@asynccontextmanager
async def open_request_plane(
    world: int, in_flight_max: int, *, encoded: bool = False, link: Link | None = None
) -> AsyncIterator[tuple[LeaderEnd, tuple[FollowerEnd, ...]]]:
    """A leader's end and one for each rank; at most `in_flight_max` plans await their reports.

    `encoded` sends everything through the codec. `link` is awaited before each delivery, in a task
    a direction. When the block ends, so do the followers' plans; what is still on a link then is
    delivered first, unless that takes longer than a follower is given to leave.
    """
    async with ServiceNursery() as nursery:
        plane = _MemoryPlane(world, in_flight_max, encoded)
        if link is not None:
            plane.insert(link, nursery)
        try:
            yield plane.leader, plane.followers
            await plane.end(LEAVE_S)
        except BaseException as error:
            for follower in plane.followers:
                follower.leader_lost(last_words(error))
            raise
        finally:
            plane.close()


class _MemoryPlane:
    def __init__(self, world: int, in_flight_max: int, encoded: bool) -> None:
        self.leader = LeaderEnd(world, in_flight_max, self._send_down, Memory())
        self.followers = tuple(
            FollowerEnd(rank, in_flight_max, partial(self._send_up, rank)) for rank in range(world)
        )
        self._encoded = encoded
        self._messages_max = in_flight_max + CONTROLS_MAX
        # What takes a message off the hands of who sends it.
        self._lines: dict[Hop, _Deliver] = {}
        for rank, follower in enumerate(self.followers):
            self._lines[_down(rank)] = follower.take
            self._lines[_up(rank)] = partial(self.leader.take, rank)
            self.leader.join(rank)

    def insert(self, link: Link, nursery: trio.Nursery) -> None:
        for hop, deliver in list(self._lines.items()):
            sender, receiver = trio.open_memory_channel[Down | Up](self._messages_max)
            self._lines[hop] = sender.send_nowait
            nursery.start_soon(self._pump, link, hop, receiver, deliver)

    async def _pump(
        self,
        link: Link,
        hop: Hop,
        messages: trio.MemoryReceiveChannel[Down | Up],
        deliver: _Deliver,
    ) -> None:
        async for message in messages:
            try:
                await link(hop)
            except PeerError as error:
                self._cut(hop.source if hop.target == LEADER else hop.target, str(error))
                return
            if self._lines[hop] is _lose:  # cut on its way back
                return
            deliver(message)

    def _cut(self, rank: int, why: str) -> None:
        self._lines[_down(rank)] = self._lines[_up(rank)] = _lose
        self.leader.rank_died(rank, why)
        self.followers[rank].leader_lost(why)

    def _send_down(self, message: Down, ranks: Collection[int]) -> None:
        if self._encoded and ranks:
            message = decode_down(encode(message))
        for rank in ranks:
            self._lines[_down(rank)](message)

    def _send_up(self, rank: int, message: Up) -> None:
        if self._encoded:
            message = decode_up(encode(message), f"rank {rank}")
        self._lines[_up(rank)](message)

    async def end(self, limit_s: float) -> None:
        """In peace: every living follower hears of the end, behind its last plan."""
        living = self.leader.living()
        self.leader.close()
        with trio.move_on_after(limit_s):
            for rank in living:
                await self.followers[rank].wait_closed()

    def close(self) -> None:
        """What is still on a link is lost, but for the end."""
        for hop in self._lines:
            self._lines[hop] = _lose
        self.leader.close()
        for follower in self.followers:
            follower.take(End())


def _down(rank: int) -> Hop:
    return Hop("request", LEADER, rank)


def _up(rank: int) -> Hop:
    return Hop("request", rank, LEADER)


def _lose(message: Down | Up) -> None:
    """Nobody is there any more."""
