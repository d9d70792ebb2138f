"""Chunks written past the HTTP library: whole and in order, whoever reads and however slowly."""

import os
import socket

import pytest
import trio
import trio.testing
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext

from aserve.api.connection import Connection, Outgoing, Tasks

CHUNKS = [b"%d:" % n + b"x" * 3000 for n in range(200)]


def connection_of(stream: trio.SocketStream, outgoing: Outgoing) -> Connection:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    context = WorkerContext(None)
    return Connection(None, HypercornConfig(), context, stream, outgoing, write_s=1000.0)


def socket_streams() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


async def test_a_chunk_that_does_not_fit_is_sent_in_the_background_before_what_follows() -> None:
    ours, theirs = socket_streams()
    outgoing = Outgoing()
    connection = connection_of(ours, outgoing)
    sent = was_busy = 0

    async def write() -> None:
        nonlocal sent, was_busy
        async with Tasks(connection) as tasks:
            connection._task_group = tasks
            for chunk in CHUNKS:
                if connection.ready():
                    connection.write(chunk)
                    outgoing.flush()
                else:
                    was_busy += 1
                    await connection._write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                sent += 1
        await ours.aclose()

    received = b""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        assert sent < len(CHUNKS)  # held up by a client that reads nothing
        async for data in theirs:
            received += data
    await theirs.aclose()
    assert was_busy > 0
    assert received == b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in CHUNKS)


async def test_a_chunk_for_a_client_that_has_gone_ends_the_connection() -> None:
    ours, theirs = socket_streams()
    outgoing = Outgoing()
    connection = connection_of(ours, outgoing)
    await theirs.aclose()
    closed = trio.Event()

    class Closing:
        async def handle(self, event: object) -> None:
            closed.set()

    connection.protocol = Closing()  # type: ignore[assignment]
    async with Tasks(connection) as tasks:
        connection._task_group = tasks
        connection.write(b"x")
        outgoing.flush()
    assert closed.is_set()
    assert ours.socket.fileno() == -1


async def test_chunks_go_when_the_last_of_a_step_is_made_each_clients_in_one_piece() -> None:
    outgoing, pairs = Outgoing(), [socket_streams() for _ in range(3)]
    connections = [connection_of(ours, outgoing) for ours, _ in pairs]
    for chunk in (b"a", b"b"):
        for connection in connections[:2]:
            connection.write(chunk)
    for _, theirs in pairs:
        with pytest.raises(BlockingIOError):
            os.read(theirs.socket.fileno(), 100)
    outgoing.flush()
    outgoing.flush()
    for _, theirs in pairs[:2]:
        assert await theirs.receive_some(100) == b"1\r\na\r\n1\r\nb\r\n"
    for pair in pairs:
        for stream in pair:
            await stream.aclose()
