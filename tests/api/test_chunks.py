"""Chunks written past the HTTP library: whole and in order, whoever reads and however slowly."""

import socket

import trio
import trio.testing
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext

from aserve.api.connection import Connection, Tasks

CHUNKS = [b"%d:" % n + b"x" * 3000 for n in range(200)]


def connection_of(stream: trio.SocketStream) -> Connection:
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Connection(None, HypercornConfig(), WorkerContext(None), stream, write_s=1000.0)


def socket_streams() -> tuple[trio.SocketStream, trio.SocketStream]:
    ours, theirs = trio.socket.socketpair()
    return trio.SocketStream(ours), trio.SocketStream(theirs)


async def test_a_chunk_that_does_not_fit_is_sent_in_the_background_before_what_follows() -> None:
    ours, theirs = socket_streams()
    connection = connection_of(ours)
    sent = was_busy = 0

    async def write() -> None:
        nonlocal sent, was_busy
        async with Tasks(connection) as tasks:
            connection._task_group = tasks
            for chunk in CHUNKS:
                if connection.ready():
                    connection.write(chunk)
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
    connection = connection_of(ours)
    await theirs.aclose()
    closed = trio.Event()

    class Closing:
        async def handle(self, event: object) -> None:
            closed.set()

    connection.protocol = Closing()  # type: ignore[assignment]
    async with Tasks(connection) as tasks:
        connection._task_group = tasks
        connection.write(b"x")
    assert closed.is_set()
    assert ours.socket.fileno() == -1
