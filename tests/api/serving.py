"""A real server on a real loopback socket, in a thread of its own, and raw clients for it."""

import pathlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec
import trio

from aserve.api.server import Server, open_server
from aserve.core.config import Config
from aserve.core.planner import PlannerStatistics

T = TypeVar("T")
LIMIT_S = 60.0


class Running:
    """A server somebody else's thread runs."""

    def __init__(self, server: Server, token: trio.lowlevel.TrioToken) -> None:
        self.url = server.url
        self.server = server
        self._token = token
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        self.address = (host, int(port))

    def call(self, function: Callable[[], T]) -> T:
        """`function()` in the server's thread."""
        return trio.from_thread.run_sync(function, trio_token=self._token)

    def wait(self, function: Callable[[], Any]) -> None:
        """Return once `function()` is true; mostly the engine's own progress says when to look."""

        async def wait() -> None:
            with trio.fail_after(LIMIT_S):
                while not function():
                    # A step, an end or an abort; a bare checkpoint covers what is no progress.
                    with trio.move_on_after(0.01):
                        await self.server.service.engine.wait_progress()

        trio.from_thread.run(wait, trio_token=self._token)

    def planner(self) -> PlannerStatistics:
        return self.call(lambda: self.server.service.engine.statistics().planner)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=LIMIT_S)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=LIMIT_S)

    def exchange(self, data: bytes) -> bytes:
        """Send raw bytes, say that no more comes, and read to the end of the answer."""
        with self.connect() as raw:
            try:
                raw.sendall(data)
                raw.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # refused before it was all sent
            return read_all(raw)


def read_all(raw: socket.socket) -> bytes:
    received = b""
    while True:
        try:
            data = raw.recv(1 << 16)
        except ConnectionResetError:
            return received
        if not data:
            return received
        received += data


@contextmanager
def running(config: Config) -> Iterator[Running]:
    """Serves until the block is left; what the server raises is raised there."""
    started: queue.Queue[Running | BaseException] = queue.Queue()
    stop = trio.Event()
    failures: list[BaseException] = []

    async def run() -> None:
        async with open_server(config) as server:
            started.put(Running(server, trio.lowlevel.current_trio_token()))
            await stop.wait()

    def target() -> None:
        try:
            trio.run(run)
        except BaseException as error:
            failures.append(error)
            started.put(error)

    thread = threading.Thread(target=target)
    thread.start()
    first = started.get(timeout=LIMIT_S)
    if isinstance(first, BaseException):
        thread.join()
        raise first
    try:
        yield first
    finally:
        if not failures:
            first.call(stop.set)
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


def config_of(path: pathlib.Path, **sections: dict[str, Any]) -> Config:
    """A tiny model on a free port; `sections` change single values."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": str(path), "name": "tiny"},
        "cache": {"kv_tokens": 8192},
        "compute": {"threads": 1},
        "server": {"port": 0, "drain_s": 5.0},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return msgspec.convert(values, Config)


def post(path: str, body: bytes, *headers: str, version: str = "1.1") -> bytes:
    """A raw request."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def events_of(text: str) -> list[str]:
    """The data of each server-sent event."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]
