"""Listening: strangers are greeted in the background, only expected ranks come through."""

import errno
import fcntl
import glob
import logging
import os
import socket
import stat
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import NoReturn

import trio

from aserve.errors import ConfigError, PeerError
from aserve.wire.address import Address, Memory, Tcp, Unix
from aserve.wire.connection import Connection, Identity, keep_alive, opened
from aserve.wire.frames import Frames
from aserve.wire.hello import HELLO_BYTES_MAX, Card, answer
from aserve.wire.nursery import ServiceNursery

logger = logging.getLogger("aserve.wire")

GREETING_S = 5.0  # a stranger who says nothing is hung up on after this
GREETINGS_MAX = 64  # at once; whoever comes beyond is hung up on, and tries again
REFUSALS_KEPT = 16
# Too many open files, or no memory for one more connection: it passes.
OUT_OF_MEANS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}
PAUSE_S = 0.1
FOLDER_PREFIX = "aserve-sockets-"
FOLDER_YOUNG_S = 60.0


class Listener:
    """Made by `open_listener`. What a stranger does ends nothing but its own connection."""

    def __init__(self, address: Address, identity: Identity, expected: Collection[int]) -> None:
        self.address = address  # with the port that was taken
        self.refusals: deque[str] = deque(maxlen=REFUSALS_KEPT)  # the last, for a person to read
        self._identity = identity
        self._expected = frozenset(expected)
        self._present: set[int] = set()
        self._greeting = 0
        self._greeted, self._accepted = trio.open_memory_channel[Connection](0)

    async def accept(self) -> Connection:
        """The next rank that passed the greeting; each expected rank comes once."""
        return await self._accepted.receive()

    def admit(self, card: Card) -> str | None:
        """Why a peer that has proved the secret is not wanted; None notes it as present."""
        if card.rank not in self._expected:
            wanted = ", ".join(map(str, sorted(self._expected))) or "nobody"
            return f"{card} is not expected here, but {wanted}"
        if card.rank in self._present:
            return f"{card} is here already"
        self._present.add(card.rank)
        return None

    async def serve(self, listening: trio.SocketListener, nursery: trio.Nursery) -> NoReturn:
        """trio.serve_listeners would close each stream with its task; ours go on to `accept`."""
        while True:
            try:
                stream = await listening.accept()
            except OSError as error:
                if error.errno not in OUT_OF_MEANS:
                    raise
                logger.warning("no connection can be accepted for now: %s", error)
                await trio.sleep(PAUSE_S)
            else:
                nursery.start_soon(self._serve_one, stream)

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        try:
            connection = await self._greet(stream) if self._greeting < GREETINGS_MAX else None
            if connection is not None:
                await self._greeted.send(connection)
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        if connection is None:
            await trio.aclose_forcefully(stream)

    async def _greet(self, stream: trio.SocketStream) -> Connection | None:
        """None where the peer was refused."""
        peer, identity = _name(stream), self._identity
        frames = Frames(stream, peer, HELLO_BYTES_MAX)
        admitted: list[Card] = []

        def admit(card: Card) -> str | None:
            reason = self.admit(card)
            if reason is None:
                admitted.append(card)
            return reason

        self._greeting += 1
        try:
            keep_alive(stream)
            with trio.fail_after(GREETING_S):
                card = await answer(frames, identity.card, identity.secret, admit)
            admitted.clear()  # it stays present
            return opened(frames, card, identity)
        except trio.TooSlowError:
            self._note(f"{peer}: did not greet within {GREETING_S:g} s")
        except (PeerError, OSError) as error:
            self._note(str(error))
        finally:
            self._greeting -= 1
            self._present.difference_update(card.rank for card in admitted)
        return None

    def _note(self, refusal: str) -> None:
        logger.warning("connection refused: %s", refusal)
        self.refusals.append(refusal)


@asynccontextmanager
async def open_listener(
    address: Address, identity: Identity, expected: Collection[int]
) -> AsyncIterator[Listener]:
    """Listen until the block ends; each of the `expected` ranks may come once.

    A unix socket lies in a folder that only this user may enter (made if it is missing) and goes
    with the block. Raises ConfigError where the address cannot be listened on.
    """
    if isinstance(address, Memory):
        raise ConfigError("`memory:` is inside one process: there is nothing to listen on")
    try:
        sockets = await _tcp(address) if isinstance(address, Tcp) else [await _unix(address)]
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    try:
        if isinstance(address, Tcp):
            address = Tcp(address.host, sockets[0].socket.getsockname()[1])
        listener = Listener(address, identity, expected)
        async with ServiceNursery() as nursery:
            for one in sockets:
                nursery.start_soon(listener.serve, one, nursery)
            yield listener
    finally:
        for one in sockets:
            one.socket.close()
        if isinstance(address, Unix):
            with suppress(FileNotFoundError):
                os.unlink(address.path)


@contextmanager
def open_socket_folder() -> Iterator[str]:
    """A folder with a short name that only this user may enter, gone with the block.

    What a process left that was killed goes with the next one of this user: a folder in use is
    locked by its process.
    """
    _sweep(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, ignore_cleanup_errors=True) as path:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks: nobody sweeps there either
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        finally:
            os.close(held)


def _sweep(parent: str) -> None:
    """Remove abandoned folders. Only sockets are unlinked: with anything else in it one stays."""
    for folder in glob.glob(os.path.join(glob.escape(parent), f"{FOLDER_PREFIX}*")):
        with suppress(OSError):  # somebody else's, or gone by now
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(held)
                is_young = time.time() - found.st_mtime < FOLDER_YOUNG_S  # perhaps not yet locked
                if found.st_uid != os.getuid() or is_young:
                    continue
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for name in os.listdir(held):
                    if stat.S_ISSOCK(os.stat(name, dir_fd=held, follow_symlinks=False).st_mode):
                        os.unlink(name, dir_fd=held)
                os.rmdir(folder)
            finally:
                os.close(held)


async def _tcp(address: Tcp) -> list[trio.SocketListener]:
    listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    if address.port == 0:  # a name of several addresses would get a port of its own on each
        for surplus in listeners[1:]:
            surplus.socket.close()
        del listeners[1:]
    return list(listeners)


async def _unix(address: Unix) -> trio.SocketListener:
    folder = os.path.dirname(address.path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.stat(folder)
    if found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise ConfigError(
            f"{address}: others may enter {folder}; take a folder of your own, `chmod 700` it"
        )
    _remove_stale(address.path)
    listening = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        await listening.bind(address.path)
        listening.listen(socket.SOMAXCONN)
    except BaseException:
        listening.close()
        raise
    return trio.SocketListener(listening)


def _remove_stale(path: str) -> None:
    """A socket whose process was killed still lies there; one that answers is left alone."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) == errno.ECONNREFUSED:  # a busy one has no room: EAGAIN
            os.unlink(path)


def _name(stream: trio.SocketStream) -> str:
    try:
        peer = stream.socket.getpeername()
    except OSError:
        return "a peer that left at once"
    return f"tcp:{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "a process of this host"
