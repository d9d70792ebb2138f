"""One client's connection: Hypercorn's HTTP/1.1 with the faults that hurt a model server cured.

Hypercorn shields its writes without a deadline, lets a full inbox block whoever closes it, and
resets a connection whose request was not read to its end. HTTP/2 and websockets are not spoken: a
flow-controlled stream nobody reads would escape the write deadline.
"""

import logging
import os
import re
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import chain
from socket import MSG_PEEK
from typing import Any, Protocol, cast

import h11
import trio
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Request
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import EventWrapper
from hypercorn.typing import ConnectionState, LifespanState
from hypercorn.utils import parse_socket_addr
from starlette.types import ASGIApp, Message, Scope

from aserve.api.refusal import error_json
from aserve.errors import RequestError

logger = logging.getLogger("aserve.http")
INBOX_LEN_MAX = 4
HEADERS_S = 10.0
LINGER_S = 2.0
CHUNKS = "aserve.chunks"  # the ASGI extension that is a `Chunks`
ABSOLUTE = re.compile(rb"https?://[^/?#]*", re.IGNORECASE)


class Chunks(Protocol):
    """Writes chunks of a body past Hypercorn and h11, which both keep no state of a chunk.

    Only between the first and the last body message of a response without a length.
    """

    def ready(self) -> bool:
        """Nothing that was written before still waits for the client to read."""
        ...

    def write(self, data: bytes) -> None:
        """With the next `Outgoing.flush`, which comes before anybody else can write."""
        ...


class Outgoing:
    """Chunks on their way to all clients. They go behind the last one of a step: whoever is told
    first would otherwise take the core that is to make those of the others.
    """

    def __init__(self) -> None:
        self._connections: list[Connection] = []

    def add(self, connection: "Connection") -> None:
        self._connections.append(connection)

    def flush(self) -> None:
        """Without waiting: what a socket does not take is sent in the background."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.flush()


class Inbox:
    """What the client sent, for the one task that answers; never blocks for a task that is done."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._changed = trio.Event()
        self._gone = False
        self._closed = False

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def put(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            self._gone = True
            self._messages.clear()
            self._notify()
            return
        while len(self._messages) >= INBOX_LEN_MAX and not self._closed:
            await self._changed.wait()
        if not self._closed:
            self._messages.append(message)
            self._notify()

    async def get(self) -> Message:
        while not self._messages:
            if self._gone:
                return {"type": "http.disconnect"}
            await self._changed.wait()
        message = self._messages.popleft()
        if len(self._messages) == INBOX_LEN_MAX - 1:
            self._notify()
        return message

    def close(self) -> None:
        """Nobody will read any more: what still comes is dropped."""
        self._closed = True
        self._messages.clear()
        self._notify()


class Tasks(TaskGroup):
    """Hypercorn's task group with our inbox between a connection and the application.

    `chunks` is offered to the application where its answer would be sent in chunks.
    """

    def __init__(self, chunks: Chunks) -> None:
        super().__init__()
        self._chunks = chunks

    async def spawn_app(
        self, app: Any, config: Any, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        inbox = Inbox()
        if scope["http_version"] == "1.1":
            scope["extensions"][CHUNKS] = self._chunks
        self.spawn(_run_app, app, scope, inbox, send)
        return inbox.put


async def _run_app(
    app: ASGIApp, scope: Scope, inbox: Inbox, send: Callable[[Any], Awaitable[None]]
) -> None:
    async def send_and_close(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            inbox.close()
        await send(message)

    try:
        await app(scope, inbox.get, send_and_close)
    finally:
        inbox.close()
        await send(None)


class Turn(EventWrapper):
    """The turn of a pipelined request; nothing is read meanwhile, so a hangup is looked for."""

    def __init__(self, wait_hangup: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._wait_hangup = wait_hangup

    async def wait(self) -> None:
        """Raises BrokenResourceError when the client hung up first."""
        gone = False

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal gone
            await self._wait_hangup()
            gone = True
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, nursery.cancel_scope)
            await super().wait()
            nursery.cancel_scope.cancel()
        if gone:
            raise trio.BrokenResourceError


class Http(H11Protocol):
    """HTTP/1.1 only, with a JSON body in the errors of the protocol itself."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """An offer to speak something else is ignored, as RFC 9110 7.8 allows."""

    async def _create_stream(self, request: h11.Request) -> None:
        stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        self.stream = stream
        self.keep_alive_requests += 1
        await stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=_origin_form(request.target),
                state=self.connection_state,
            )
        )

    async def _send_error_response(self, status_code: int) -> None:
        body = error_json(RequestError("This is not a valid HTTP/1.1 request.", status=status_code))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        fields = list(chain(headers, self.config.response_headers("h11")))
        await self._send_h11_event(h11.Response(status_code=status_code, headers=fields))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _origin_form(target: bytes) -> bytes:
    """The path and query of an absolute-form target, which RFC 9112 3.2.2 says to accept."""
    found = ABSOLUTE.match(target)
    if found is None:
        return target
    rest = target[found.end() :]
    return rest if rest.startswith(b"/") else b"/" + rest


class Connection(TCPServer):
    """Reads, writes and ends one client's socket; every write has a deadline."""

    stream: trio.SocketStream  # type: ignore[assignment]
    protocol: Http  # type: ignore[assignment]

    def __init__(
        self,
        app: Any,
        config: Any,
        context: Any,
        stream: trio.SocketStream,
        outgoing: Outgoing,
        *,
        write_s: float,
    ) -> None:
        super().__init__(app, config, context, LifespanState(), cast(Any, stream))
        self._outgoing = outgoing
        self._write_s = write_s
        self._writing = trio.CancelScope()
        self._reading = trio.CancelScope()
        self._closing = False
        self._answered = False
        self._cut = False
        self._chunks: list[bytes] = []  # for the next flush
        self._unsent = b""  # of chunks, for `_write` to send first

    async def run(self) -> None:
        socket = self.stream.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with Tasks(self) as tasks:
                self._task_group = tasks
                self.protocol = Http(
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                self.protocol.can_read = Turn(self._wait_hangup)
                await self.idle_task.restart(tasks, partial(self._wait_idle, HEADERS_S))
                await self._read_data()
                await self.idle_task.stop()
        except OSError:
            pass  # the client is gone, which is its right
        finally:
            await trio.aclose_forcefully(self.stream)

    def cut(self) -> None:
        """Shutdown is over time: a write may now be cancelled with everything else."""
        self._cut = True
        self._writing.shield = False

    def ready(self) -> bool:
        """See `Chunks`."""
        return not self._unsent and not self.send_lock.locked()

    def write(self, data: bytes) -> None:
        """See `Chunks`."""
        if not self._chunks:
            self._outgoing.add(self)
        self._chunks.append(b"%x\r\n%b\r\n" % (len(data), data))

    def flush(self) -> None:
        """See `Outgoing`."""
        assert not self._unsent
        frames = b"".join(self._chunks)
        self._chunks.clear()
        try:
            self._unsent = frames[os.write(self.stream.socket.fileno(), frames) :]
        except OSError:  # full or gone: sending it shows which
            self._unsent = frames
        if self._unsent:
            self._task_group.spawn(self._write, b"")

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            await self._close()
            await self.protocol.handle(Closed())
        elif isinstance(event, Updated) and not self._closing:
            if event.idle:
                idle = partial(self._wait_idle, self.config.keep_alive_timeout)
                await self.idle_task.restart(self._task_group, idle)
            else:
                await self.idle_task.stop()

    async def _write(self, data: bytes) -> None:
        """Send all of `data`, or end the connection if its client does not take it in time."""
        try:
            left = self._write_now(data)
            if not left and not self._unsent:
                return
            async with self.send_lock:
                left, self._unsent = self._unsent + left, b""
                # Cut short, a write would leave half a frame: it is shielded, but not for ever.
                with trio.move_on_after(self._write_s, shield=not self._cut) as self._writing:
                    await self.stream.send_all(left)
                    return
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        else:
            logger.info("client read nothing for %g s: cut off", self._write_s)
        await trio.aclose_forcefully(self.stream)
        await self.protocol.handle(Closed())

    def _write_now(self, data: bytes) -> bytes:
        """Send what the socket takes without waiting, as it nearly always does with a chunk; the
        rest is returned. A scope, a lock and a trip round the event loop would cost more than it.
        """
        if not self.ready():
            return data
        try:
            return data[os.write(self.stream.socket.fileno(), data) :]
        except BlockingIOError:
            return data

    async def _read_data(self) -> None:
        with self._reading:
            while True:
                try:
                    data = await self.stream.receive_some(MAX_RECV)
                    if not self._closing:
                        await self.protocol.handle(RawData(bytes(data)))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
                if not data:
                    break
        # An answer may still be written, but nothing is awaited after it: no idle time begins.
        self._closing = True
        await self.protocol.handle(Closed())

    async def _wait_hangup(self) -> None:
        try:
            ahead = await self.stream.socket.recv(1, MSG_PEEK)
        except (OSError, trio.ClosedResourceError):
            return
        if ahead:
            await trio.sleep_forever()  # it has sent more, behind which no hangup can be seen

    async def _close(self) -> None:
        """Say that no more comes, then read on a little: closing a socket with unread bytes
        resets it, and the client would lose the answer that told it to stop."""
        if self._closing:
            return
        self._closing = True
        try:
            await self.stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            await trio.aclose_forcefully(self.stream)
        self._reading.deadline = trio.current_time() + LINGER_S

    async def _wait_idle(self, limit_s: float) -> None:
        """End a connection that sends no whole request head for `limit_s`, or at shutdown."""
        with trio.move_on_after(limit_s):
            await self.context.terminated.wait()
        with trio.CancelScope(shield=True):
            await self.protocol.handle(Closed())
            await trio.aclose_forcefully(self.stream)
