"""A connection to a peer that has proved itself, and how to make one."""

import socket

import msgspec
import trio

from aserve.errors import ConfigError, PeerError
from aserve.wire.address import Address, Memory, Tcp, Unix
from aserve.wire.frames import Frames
from aserve.wire.hello import HELLO_BYTES_MAX, Card, Refusal, greet

RETRY_FIRST_S, RETRY_LAST_S = 0.02, 0.5
# A host that vanished without a word is noticed in about IDLE + INTERVAL * PROBES seconds.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 3, 1, 4


class Identity(msgspec.Struct, frozen=True):
    """What an end shows of itself, the secret it shares, and the longest frame it accepts."""

    card: Card
    secret: bytes
    frame_bytes_max: int


class Connection(msgspec.Struct, frozen=True):
    """An open connection and who is at its other end."""

    frames: Frames
    card: Card


async def connect(address: Address, identity: Identity, *, limit_s: float) -> Connection:
    """Connect and greet, trying again until `limit_s` seconds have gone.

    Raises Refusal at once where either end refuses, PeerError where nobody answered in time.
    """
    if isinstance(address, Memory):
        raise ConfigError("`memory:` is inside one process: nothing can connect to it")
    last: Exception | None = None
    pause_s = RETRY_FIRST_S
    with trio.move_on_after(limit_s):
        while True:
            try:
                return await _connect_once(address, identity)
            except Refusal:
                raise
            except (OSError, PeerError) as error:
                last = error
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_LAST_S)
    raise PeerError(str(address), f"not reached within {limit_s:g} s ({last or 'no answer'})")


async def _connect_once(address: Unix | Tcp, identity: Identity) -> Connection:
    if isinstance(address, Unix):
        stream = await trio.open_unix_socket(address.path)
    else:
        stream = await trio.open_tcp_stream(address.host, address.port)
    try:
        keep_alive(stream)
        frames = Frames(stream, str(address), HELLO_BYTES_MAX)
        card = await greet(frames, identity.card, identity.secret)
    except BaseException:
        await trio.aclose_forcefully(stream)
        raise
    return opened(frames, card, identity)


def opened(frames: Frames, card: Card, identity: Identity) -> Connection:
    """The greeting is over: from here on the frames are those of the plane."""
    frames.peer = str(card)
    frames.frame_bytes_max = identity.frame_bytes_max
    return Connection(frames, card)


def keep_alive(stream: trio.SocketStream) -> None:
    """Let the kernel find out that a peer's host has gone, or that its process reads no more.

    A unix socket's peer is on this host, and its end is told at once.
    """
    if stream.socket.family == socket.AF_UNIX:
        return
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
        (socket.TCP_USER_TIMEOUT, 1000 * (KEEPALIVE_IDLE_S + KEEPALIVE_PROBES)),
    ):
        stream.setsockopt(socket.IPPROTO_TCP, option, value)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
