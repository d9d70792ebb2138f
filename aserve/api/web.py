"""The listening side: sockets bound before anything else, a bounded number of connections."""

import errno
import logging
import socket
from typing import Any

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio.worker_context import WorkerContext
from starlette.types import ASGIApp

from aserve.api.connection import Connection, Outgoing
from aserve.api.refusal import error_json
from aserve.core.config import Server
from aserve.errors import ConfigError, RequestError

logger = logging.getLogger("aserve.http")
BACKLOG = 512
# `localhost` has an IPv6 address on machines without IPv6.
ABSENT_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
HEADER_BYTES_MAX = 32 << 10


def bind(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for every address of `host`; ConfigError says why there is none.

    Connections wait in their queues until somebody accepts them.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"server.host {host!r} cannot be resolved: {error}") from None
    sockets: list[socket.socket] = []
    failure = OSError("no address")
    for family, kind, protocol, _, address in found:
        # Port 0 means one free port, so every further family takes the port of the first.
        place = (address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:])
        try:
            sockets.append(_bound(family, kind, protocol, place))
        except OSError as error:
            failure = error
            if error.errno in ABSENT_FAMILY:
                continue
            for opened in sockets:
                opened.close()
            raise ConfigError(_why_not_bound(host, port, error)) from None
    if not sockets:
        raise ConfigError(_why_not_bound(host, port, failure))
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    opened = socket.socket(family, kind, protocol)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if opened.family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        opened.bind(address)
        opened.listen(BACKLOG)
        opened.setblocking(False)
    except OSError:
        opened.close()
        raise
    return opened


def _why_not_bound(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another process; choose another with --port."
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs privileges this process does not have."
    return f"server.host {host}, server.port {port} cannot be bound: {error}"


def url_of(sockets: list[socket.socket]) -> str:
    host, port = sockets[0].getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Web:
    """Accepts connections until told to stop; knows those that are open."""

    def __init__(self, app: ASGIApp, config: Server, outgoing: Outgoing) -> None:
        self._app = app
        self._outgoing = outgoing
        self._config = config
        self._context = WorkerContext(None)
        self._listening = trio.CancelScope()
        self._connections: set[Connection] = set()
        self._hypercorn = _hypercorn_config(config)
        self._closed = trio.Event()

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def run(self, sockets: list[socket.socket]) -> None:
        """Serve on `sockets` (closed at the end) until `stop` was called and the last client left.

        Cancelling it ends every connection at once, but for a write in progress; see `cut`.
        """
        listeners = [
            trio.SocketListener(trio.socket.from_stdlib_socket(opened)) for opened in sockets
        ]
        try:
            async with trio.open_nursery() as clients:
                with self._listening:
                    await trio.serve_listeners(self._serve, listeners, handler_nursery=clients)
                for listener in listeners:
                    listener.socket.close()
        finally:
            self._closed.set()

    async def wait_closed(self) -> None:
        """The last client has left."""
        await self._closed.wait()

    async def stop(self) -> None:
        """No new connection, and none kept after the answer it is waiting for."""
        self._listening.cancel()
        await self._context.terminated.set()

    def cut(self) -> None:
        for connection in self._connections:
            connection.cut()

    async def _serve(self, stream: trio.SocketStream) -> None:
        if len(self._connections) >= self._config.connections_max:
            await _refuse(stream)
            return
        connection = Connection(
            self._app,
            self._hypercorn,
            self._context,
            stream,
            self._outgoing,
            write_s=self._config.write_s,
        )
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception:
            # One connection's fault, ours or Hypercorn's, must not end the others.
            logger.exception("a connection failed")
        finally:
            self._connections.discard(connection)


async def _refuse(stream: trio.SocketStream) -> None:
    body = error_json(RequestError("Too many connections.", status=503, code="overloaded"))
    head = (
        b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    try:
        with trio.move_on_after(1):
            await stream.send_all(head + body)
            await stream.send_eof()
            # Unread bytes would turn the close into a reset that eats the answer.
            await stream.receive_some(1 << 16)
    except trio.BrokenResourceError:
        pass
    finally:
        await trio.aclose_forcefully(stream)


def _hypercorn_config(config: Server) -> HypercornConfig:
    made = HypercornConfig()
    made.accesslog = None
    made.errorlog = logging.getLogger("aserve.http")
    made.include_server_header = False
    made.h11_max_incomplete_size = HEADER_BYTES_MAX
    made.keep_alive_timeout = config.keep_alive_s
    made.keep_alive_max_requests = 1 << 30
    return made
