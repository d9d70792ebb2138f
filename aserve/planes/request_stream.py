"""The request plane between processes, over the wire: a connection a rank, opened by the rank.

A plan is encoded once for all ranks. Each end writes in a task of its own from a queue with room
for all that the protocol allows, and reads in another, so that a rank answers while it computes.
"""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress

import trio

from aserve.core.codec import Down, decode_down, decode_up, encode
from aserve.errors import PeerError
from aserve.planes.request import CONTROLS_MAX, LEAVE_S, FollowerEnd, LeaderEnd
from aserve.planes.terms import Terms
from aserve.wire.address import Address
from aserve.wire.connection import Connection, connect
from aserve.wire.frames import Frames
from aserve.wire.hello import LEADER
from aserve.wire.listener import Listener, open_listener
from aserve.wire.nursery import ServiceNursery

ROLE = "request"
LAST_WORDS_S = 1.0  # for an end's own last message to get out
SILENT = "its connection ended without a word"


class _Outbox:
    """Frames on their way out; the room is that of the protocol, so putting never waits.

    A `lasting` one goes on through a cancellation until `finish`, for the last word's sake.
    """

    def __init__(self, messages_max: int, *, lasting: bool = False) -> None:
        self._sender, self._receiver = trio.open_memory_channel[bytes](messages_max)
        self._scope = trio.CancelScope(shield=lasting)
        self._done = trio.Event()

    def put(self, data: bytes) -> None:
        if not self._done.is_set():
            self._sender.send_nowait(data)

    async def write(self, frames: Frames) -> None:
        """Until `finish`. A peer that is gone is the reader's to notice."""
        try:
            with self._scope, suppress(PeerError):
                async for data in self._receiver:
                    await frames.send(data)
        finally:
            self._done.set()

    async def finish(self, limit_s: float) -> None:
        """Let what was put get out, also where this task is being cancelled."""
        self._sender.close()
        with trio.move_on_after(limit_s, shield=True):
            await self._done.wait()
        self._scope.cancel()


@asynccontextmanager
async def open_leader(address: Address, terms: Terms) -> AsyncIterator[LeaderEnd]:
    """Listen for every rank of the terms; `leader.address` has the port that was taken.

    When the block ends in peace the ranks are told so and given time to leave. Raises ConfigError
    where the address cannot be listened on.
    """
    identity = terms.identity(ROLE, LEADER)
    async with open_listener(address, identity, range(terms.world)) as listener:
        plane = _StreamLeader(listener, terms)
        async with ServiceNursery() as nursery:
            nursery.start_soon(plane.welcome, nursery)
            yield plane.leader
            plane.leader.close()
            await plane.leader.wait_left(LEAVE_S)


class _StreamLeader:
    def __init__(self, listener: Listener, terms: Terms) -> None:
        self.leader = LeaderEnd(terms.world, terms.in_flight_max, self._send, listener.address)
        self._listener = listener
        self._messages_max = terms.in_flight_max + CONTROLS_MAX
        self._outboxes: dict[int, _Outbox] = {}

    def _send(self, message: Down, ranks: Collection[int]) -> None:
        if ranks:
            data = encode(message)
            for rank in ranks:
                self._outboxes[rank].put(data)

    async def welcome(self, nursery: trio.Nursery) -> None:
        while True:
            connection = await self._listener.accept()
            nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: Connection) -> None:
        """One rank, until it is gone."""
        rank, frames = connection.card.rank, connection.frames
        outbox = self._outboxes[rank] = _Outbox(self._messages_max)
        async with frames, trio.open_nursery() as nursery:
            nursery.start_soon(outbox.write, frames)
            self.leader.join(rank)
            try:
                while True:
                    self.leader.take(rank, decode_up(await frames.receive(), frames.peer))
            except trio.EndOfChannel:
                self.leader.rank_died(rank, SILENT)
            except PeerError as error:
                self.leader.rank_died(rank, error.reason)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_follower(
    address: Address, terms: Terms, rank: int, *, limit_s: float
) -> AsyncIterator[FollowerEnd]:
    """Connect as a rank. At its end the block tells the leader that it left, or what it died of.

    Raises Refusal where either end refuses the other, PeerError where no leader is found in time.
    """
    connection = await connect(address, terms.identity(ROLE, rank), limit_s=limit_s)
    outbox = _Outbox(terms.in_flight_max + CONTROLS_MAX, lasting=True)
    follower = FollowerEnd(rank, terms.in_flight_max, lambda up: outbox.put(encode(up)))
    async with connection.frames as frames, ServiceNursery() as nursery:
        nursery.start_soon(outbox.write, frames)
        nursery.start_soon(_read, frames, follower)
        try:
            async with follower:
                yield follower
        finally:
            await outbox.finish(LAST_WORDS_S)


async def _read(frames: Frames, follower: FollowerEnd) -> None:
    try:
        while True:
            follower.take(decode_down(await frames.receive(), frames.peer))
    except trio.EndOfChannel:
        follower.leader_lost(SILENT)
    except PeerError as error:
        follower.leader_lost(error.reason)
