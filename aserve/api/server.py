"""A whole server in one `async with`: port, model, engine, clients; and how it ends."""

import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import trio

from aserve.actors.engine import open_engine
from aserve.api.app import build_app
from aserve.api.call import only_error
from aserve.api.log import start_log
from aserve.api.service import Service
from aserve.api.web import Web, bind, url_of
from aserve.core.config import Config

logger = logging.getLogger("aserve.http")
SIGNALS = (signal.SIGTERM, signal.SIGINT)
FAREWELL_S = 1.0

Progress = Callable[[int, int, str], None]


class Server(msgspec.Struct, frozen=True):
    """A server that takes requests at `url`."""

    url: str
    service: Service
    web: Web


@asynccontextmanager
async def open_server(config: Config, *, progress: Progress | None = None) -> AsyncIterator[Server]:
    """Serve until the block is left, which drains for up to `server.drain_s`.

    The port is taken first (ConfigError if it is another's) and answers 503 while the model loads;
    the block is entered when the engine is there. Cancelled, or left by an exception, it ends at
    once.
    """
    sockets = bind(config.server.host, config.server.port)
    service = Service(config)
    web = Web(build_app(service), config.server, service.outgoing)
    try:
        async with trio.open_nursery() as nursery:
            serving = trio.CancelScope()
            nursery.start_soon(_run_web, web, sockets, serving)
            try:
                async with open_engine(config=config, progress=progress) as engine:
                    service.open(engine)
                    try:
                        yield Server(url_of(sockets), service, web)
                        await _drain(service, web, config.server.drain_s)
                    finally:
                        await _end(service, web, serving)
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_error(group) from None
    finally:
        for opened in sockets:
            opened.close()


async def _drain(service: Service, web: Web, limit_s: float) -> None:
    """Take nothing new, let what runs end, then end it with an error its client can read."""
    logger.info("draining for up to %g s", limit_s)
    service.close()
    await web.stop()
    with trio.move_on_after(limit_s) as waiting:
        await web.wait_closed()
    if waiting.cancelled_caught:
        logger.warning("%d connections still open after %g s", web.connections, limit_s)
        service.end_calls()
        with trio.move_on_after(FAREWELL_S):
            await web.wait_closed()


async def _run_web(web: Web, sockets: list[socket.socket], serving: trio.CancelScope) -> None:
    with serving:
        await web.run(sockets)


async def _end(service: Service, web: Web, serving: trio.CancelScope) -> None:
    """No client may outlive the engine; once writes are cut, nothing here can wait for one.

    Only the clients are cancelled: cancelled itself, the block would lose the error it ends with.
    """
    service.close()
    web.cut()
    serving.cancel()
    with trio.CancelScope(shield=True):
        await web.wait_closed()


async def serve(
    config: Config,
    *,
    ready: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> signal.Signals | None:
    """Serve until SIGTERM or SIGINT; `ready(url)` is called once requests are taken.

    The first signal drains (while the model loads: ends), the second ends at once. Outside the
    main thread, where no signal arrives, it serves until cancelled. Returns the signal that ended
    it before it was ready, if one did. Raises ConfigError.
    """
    start_log(config.server)
    if config.server.api_key is None and not is_loopback(config.server.host):
        logger.warning("anybody who reaches %s may use this server: no api_key", config.server.host)
    stop = _Stop()
    try:
        with stop.everything:
            async with trio.open_nursery() as nursery:
                if threading.current_thread() is threading.main_thread():
                    await nursery.start(_watch_signals, stop)
                async with open_server(config, progress=progress) as server:
                    stop.drains = True
                    if ready is not None:
                        ready(server.url)
                    await stop.asked.wait()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise only_error(group) from None
    return None if stop.drains else stop.first


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Stop:
    """What a signal does: the first asks for an end once there is something to drain."""

    def __init__(self) -> None:
        self.everything = trio.CancelScope()
        self.asked = trio.Event()
        self.drains = False
        self.first: signal.Signals | None = None

    def take(self, number: signal.Signals) -> None:
        self.first = self.first or number
        if self.drains and not self.asked.is_set():
            self.asked.set()
        else:
            self.everything.cancel()


async def _watch_signals(
    stop: _Stop, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(*SIGNALS) as signals:
        task_status.started()
        async for number in signals:
            logger.info("%s received", signal.Signals(number).name)
            stop.take(signal.Signals(number))
