"""The first words on a connection: who speaks, in which version, and the proof of a shared secret.

    connector                                   listener
    Hello(version, card, nonce)    ------->
                                   <-------     Challenge(nonce)            or Refused(reason)
    Proof(hmac)                    ------->
                                   <-------     Welcome(card, hmac)         or Refused(reason)

Each proof is an HMAC-SHA256 over a word for its direction and everything said before, both nonces
included, so it is of no use in another connection or the other direction. It shows that the other
end knows the secret when the connection opens; it neither hides nor signs what follows.
"""

import hmac
import secrets
from collections.abc import Callable
from typing import TypeVar

import msgspec
import trio

from aserve.errors import PeerError
from aserve.wire.frames import Frames

VERSION = 1
HELLO_BYTES_MAX = 4096
REASON_LEN_MAX = 300
NONCE_BYTES = 32
SECRET_BYTES_MIN = 16


class Card(msgspec.Struct, frozen=True, array_like=True):
    """Who an end says it is. Both ends must be of one `run` and one `world`."""

    role: str  # of the connection: "request", "hidden"
    rank: int  # of the end; LEADER for who is no rank
    world: int
    run: str = ""  # which start of the grid, where an old one may still be about

    def __str__(self) -> str:
        return "the leader" if self.rank == LEADER else f"rank {self.rank}"


LEADER = -1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    version: int
    card: Card
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    card: Card
    proof: bytes


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    reason: str


class Refusal(PeerError):
    """The two ends do not belong together; both were told why."""


Message = TypeVar("Message", Hello, Challenge, Proof, Welcome)
# Says why a peer that has proved the secret is not wanted; None lets it in.
Admit = Callable[[Card], str | None]


def new_secret() -> bytes:
    return secrets.token_bytes(32)


async def greet(frames: Frames, mine: Card, secret: bytes) -> Card:
    """The connector's half; returns the listener's card. The caller sets the deadline.

    Raises Refusal if either end refuses, PeerError if the other is lost or talks otherwise.
    """
    hello = Hello(VERSION, mine, secrets.token_bytes(NONCE_BYTES))
    await _send(frames, hello)
    challenge = await _receive(frames, Challenge)
    await _send(frames, Proof(_proof(secret, "connector", hello, challenge.nonce, mine)))
    welcome = await _receive(frames, Welcome)
    expected = _proof(secret, "listener", hello, challenge.nonce, welcome.card)
    if not hmac.compare_digest(welcome.proof, expected):
        raise Refusal(frames.peer, "it does not know our secret")
    return welcome.card


async def answer(frames: Frames, mine: Card, secret: bytes, admit: Admit) -> Card:
    """The listener's half; returns the connector's card. The caller sets the deadline.

    `admit` is asked last, of a peer that has proved itself. Raises as `greet` does.
    """
    hello = await _receive(frames, Hello)
    if hello.version != VERSION:
        await _refuse(frames, f"it speaks version {hello.version}, we speak {VERSION}")
    challenge = Challenge(secrets.token_bytes(NONCE_BYTES))
    await _send(frames, challenge)
    proof = await _receive(frames, Proof)
    expected = _proof(secret, "connector", hello, challenge.nonce, hello.card)
    if not hmac.compare_digest(proof.proof, expected):
        await _refuse(frames, "its secret is not ours")
    reason = _difference(hello.card, mine) or admit(hello.card)
    if reason is not None:
        await _refuse(frames, reason)
    await _send(frames, Welcome(mine, _proof(secret, "listener", hello, challenge.nonce, mine)))
    return hello.card


def _difference(theirs: Card, mine: Card) -> str | None:
    for name in ("role", "run", "world"):
        if getattr(theirs, name) != getattr(mine, name):
            return f"its {name} is {getattr(theirs, name)!r}, ours is {getattr(mine, name)!r}"
    return None


def _proof(secret: bytes, speaker: str, hello: Hello, nonce: bytes, card: Card) -> bytes:
    assert len(secret) >= SECRET_BYTES_MIN, len(secret)
    transcript = msgspec.msgpack.encode((speaker, hello, nonce, card))
    return hmac.digest(secret, transcript, "sha256")


async def _send(frames: Frames, message: Hello | Challenge | Proof | Welcome | Refused) -> None:
    await frames.send(msgspec.msgpack.encode(message))


async def _refuse(frames: Frames, reason: str) -> None:
    reason = reason[:REASON_LEN_MAX]  # it may quote what the peer made as long as it liked
    await _send(frames, Refused(reason))
    raise Refusal(frames.peer, f"refused: {reason}")


async def _receive(frames: Frames, kind: type[Message]) -> Message:
    try:
        data = await frames.receive()
        message = msgspec.msgpack.decode(data, type=kind | Refused)
    except trio.EndOfChannel:
        raise PeerError(frames.peer, "hung up during the greeting") from None
    except (msgspec.MsgspecError, RecursionError) as error:  # also what is nested in surplus fields
        raise PeerError(frames.peer, f"does not greet as we do: {error}") from error
    if isinstance(message, Refused):
        # Whoever this is has proved nothing yet: its words are for a person to read, no more.
        reason = "".join(char for char in message.reason[:REASON_LEN_MAX] if char.isprintable())
        raise Refusal(frames.peer, f"refused us: {reason}")
    assert isinstance(message, kind)
    return message
