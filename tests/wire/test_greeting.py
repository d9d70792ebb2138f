"""Only who knows the secret and is expected gets a connection; both ends can say why not."""

import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress

import msgspec
import pytest
import trio
import trio.testing

from aserve.errors import ConfigError, PeerError
from aserve.wire import hello, listener
from aserve.wire.address import Address, Memory, Tcp, Unix
from aserve.wire.connection import Connection, Identity, connect
from aserve.wire.frames import Frames
from aserve.wire.hello import LEADER, Card, Challenge, Hello, Proof, Refusal, Welcome, new_secret
from aserve.wire.listener import Listener, open_listener, open_socket_folder

SECRET, BYTES_MAX = b"sixteen bytes of" * 2, 1000
LIMIT_S = 10.0


def identity(rank: int = 1, *, secret: bytes = SECRET, **card: object) -> Identity:
    shown = {"role": "request", "rank": rank, "world": 3} | card
    return Identity(Card(**shown), secret, BYTES_MAX)  # type: ignore[arg-type]


LEADERS = identity(LEADER)


@pytest.fixture
def folder() -> Iterator[str]:
    with open_socket_folder() as path:
        yield path


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, folder: str) -> Address:
    return Unix(f"{folder}/a.sock") if request.param == "unix" else Tcp("127.0.0.1", 0)


@asynccontextmanager
async def listening(address: Address) -> AsyncIterator[Listener]:
    async with open_listener(address, LEADERS, range(3)) as opened:
        yield opened


async def talk(first: Connection, second: Connection) -> None:
    await first.frames.send(b"there")
    assert await second.frames.receive() == b"there"
    await second.frames.send(b"and back")
    assert await first.frames.receive() == b"and back"


async def meet(opened: Listener, rank: int = 1) -> tuple[Connection, Connection]:
    ours = await connect(opened.address, identity(rank), limit_s=LIMIT_S)
    return ours, await opened.accept()


async def test_ends_that_know_the_secret_meet_and_know_each_other(address: Address) -> None:
    async with listening(address) as opened:
        ours, theirs = await meet(opened)
        async with ours.frames, theirs.frames:
            assert ours.card.rank == LEADER
            assert theirs.card == Card("request", 1, 3)
            assert (ours.frames.peer, theirs.frames.peer) == ("the leader", "rank 1")
            await talk(ours, theirs)
        assert not opened.refusals


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (identity(secret=b"another secret of some length"), "its secret is not ours"),
        (identity(3), "rank 3 is not expected here, but 0, 1, 2"),
        (identity(LEADER), "the leader is not expected here"),
        (identity(0), "rank 0 is here already"),
        (identity(role="hidden"), "its role is 'hidden', ours is 'request'"),
        (identity(world=4), "its world is 4, ours is 3"),
        (identity(role="\0" * 1300), "its role is '"),
        (identity(run="yesterday"), "its run is 'yesterday', ours is ''"),
    ],
)
async def test_who_does_not_belong_is_refused_and_told_why_and_the_listener_serves_on(
    address: Address, wrong: Identity, reason: str
) -> None:
    async with listening(address) as opened:
        there = await meet(opened, 0)
        with pytest.raises(Refusal) as caught:
            await connect(opened.address, wrong, limit_s=LIMIT_S)
        assert reason in str(caught.value)
        assert str(opened.address) in str(caught.value)
        assert [reason in refusal for refusal in opened.refusals] == [True]
        more = await meet(opened, 1)
        await talk(*there)
        await talk(*more)
        for connection in (*there, *more):
            await connection.frames.aclose()


async def test_another_version_is_refused(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(address) as opened:
        stream = await raw(opened.address)
        frames = Frames(stream, "listener", BYTES_MAX)
        other = Hello(hello.VERSION + 1, identity().card, b"n" * 32)
        await frames.send(msgspec.msgpack.encode(other))
        said = await frames.receive()
        assert b"it speaks version 2, we speak 1" in said
        with pytest.raises(trio.EndOfChannel):
            await frames.receive()
        await frames.aclose()
        assert "it speaks version 2, we speak 1" in opened.refusals[0]


async def test_a_listener_that_does_not_know_the_secret_is_found_out() -> None:
    """It lets everybody in, to be sent what is meant for the leader."""
    ours, theirs = trio.testing.memory_stream_pair()
    liar = Frames(theirs, "rank 1", BYTES_MAX)

    async def lie() -> None:
        await liar.receive()
        await liar.send(msgspec.msgpack.encode(Challenge(b"m" * 32)))
        proof = msgspec.msgpack.decode(await liar.receive(), type=Proof).proof
        await liar.send(msgspec.msgpack.encode(Welcome(LEADERS.card, proof)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lie)
        with pytest.raises(Refusal, match="the listener: it does not know our secret"):
            await hello.greet(Frames(ours, "the listener", BYTES_MAX), identity().card, SECRET)


async def test_a_proof_is_of_no_use_in_another_connection(address: Address) -> None:
    """A stranger repeats, word for word, what it overheard."""
    words: list[bytes] = []
    async with listening(address) as opened:
        stream = await raw(opened.address)
        frames = Recorded(stream, "listener", BYTES_MAX)
        frames.sent = words
        await hello.greet(frames, identity(1).card, SECRET)
        await frames.aclose()
        await (await opened.accept()).frames.aclose()
        assert len(words) == 2
        again = Frames(await raw(opened.address), "listener", BYTES_MAX)
        await again.send(words[0])
        assert isinstance(msgspec.msgpack.decode(await again.receive(), type=Challenge), Challenge)
        await again.send(words[1])
        assert b"its secret is not ours" in await again.receive()
        await again.aclose()


async def test_the_listeners_own_proof_does_not_pass_for_a_connectors(address: Address) -> None:
    """Reflection: the same nonces, the other direction."""
    said = Hello(hello.VERSION, identity().card, b"n" * 32)
    for_us = hello._proof(SECRET, "listener", said, b"m" * 32, LEADERS.card)
    for_them = hello._proof(SECRET, "connector", said, b"m" * 32, LEADERS.card)
    assert for_us != for_them


class Recorded(Frames):
    sent: list[bytes]

    async def send(self, value: bytes) -> None:
        self.sent.append(value)
        await super().send(value)


async def raw(address: Address) -> trio.SocketStream:
    if isinstance(address, Unix):
        return await trio.open_unix_socket(address.path)
    assert isinstance(address, Tcp)
    return await trio.open_tcp_stream(address.host, address.port)


async def hung_up_on(stream: trio.SocketStream) -> None:
    """Politely, with a last word, or not."""
    async with stream:
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some(100):
                pass


async def test_a_silent_stranger_is_hung_up_on_and_holds_nobody_up(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETING_S", 0.05)
    async with listening(address) as opened:
        silent = await raw(opened.address)
        ours, theirs = await meet(opened)
        assert await silent.receive_some(1) == b""
        assert "did not greet within 0.05 s" in opened.refusals[0]
        await talk(ours, theirs)
        for stream in (silent, ours.frames, theirs.frames):
            await stream.aclose()


async def test_strangers_beyond_the_limit_are_hung_up_on_until_there_is_room(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "GREETINGS_MAX", 2)
    async with listening(address) as opened:
        silent = [await raw(opened.address) for _ in range(2)]
        await trio.testing.wait_all_tasks_blocked(0.01)
        surplus = await raw(opened.address)
        with trio.fail_after(listener.GREETING_S / 2):  # sooner than for its silence
            assert await surplus.receive_some(1) == b""
        await surplus.aclose()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meet_and_close, opened)
            for stream in silent:
                await stream.aclose()


async def meet_and_close(opened: Listener) -> None:
    for connection in await meet(opened):
        await connection.frames.aclose()


def nested_hello(n_bytes: int) -> bytes:
    """A whole Hello with a surplus field of arrays in arrays, deeper than any decoder follows."""
    said = bytearray(msgspec.msgpack.encode(Hello(hello.VERSION, identity().card, b"n" * 32)))
    said[0] += 1
    return bytes(said).ljust(n_bytes, b"\x91")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\3abc",
        b"\0\0\0\4" + msgspec.msgpack.encode(["x", 1]),
        msgspec.msgpack.encode(Proof(b"")),
        b"\0\0\x0f\0" + nested_hello(0xF00),
    ],
    ids=["nothing", "a byte", "http", "text", "no greeting", "no frame", "nested"],
)
async def test_garbage_is_refused_and_the_listener_serves_on(address: Address, data: bytes) -> None:
    async with listening(address) as opened:
        stranger = await raw(opened.address)
        await stranger.send_all(data)
        await stranger.send_eof()
        await hung_up_on(stranger)
        assert len(opened.refusals) == 1
        await meet_and_close(opened)


async def test_a_rank_whose_greeting_failed_at_the_last_word_may_come_again(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, failed = hello._send, []

    async def send_or_fail(frames: Frames, message: object) -> None:
        if isinstance(message, Welcome) and not failed:
            failed.append(message)
            raise PeerError(frames.peer, "the connection was lost")
        await send(frames, message)  # type: ignore[arg-type]

    monkeypatch.setattr(hello, "_send", send_or_fail)
    async with listening(address) as opened:
        await meet_and_close(opened)  # connecting tries again by itself
        assert len(failed) == len(opened.refusals) == 1
        assert opened.admit(Card("request", 1, 3)) == "rank 1 is here already"


async def test_connecting_waits_for_a_listener_that_comes_later(folder: str) -> None:
    address = Unix(f"{folder}/later.sock")
    found: list[Connection] = []

    async def come() -> None:
        found.append(await connect(address, identity(), limit_s=LIMIT_S))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(come)
        await trio.testing.wait_all_tasks_blocked()
        async with listening(address) as opened:
            found.append(await opened.accept())
            await trio.testing.wait_all_tasks_blocked(0.01)
            await talk(*found)
    for connection in found:
        await connection.frames.aclose()


@pytest.mark.parametrize("path", ["no/such.sock", "dead.sock"])
async def test_nobody_there_is_told_with_the_limit_and_the_last_reason(
    folder: str, path: str, autojump_clock: trio.testing.MockClock
) -> None:
    address = Unix(f"{folder}/{path}")
    with pytest.raises(PeerError, match=r"not reached within 7 s \(.*No such file"):
        await connect(address, identity(), limit_s=7)
    assert 7 <= trio.current_time() < 8


async def test_a_listener_that_never_answers_is_not_waited_for_beyond_the_limit(
    folder: str,
) -> None:
    with trio.socket.socket(trio.socket.AF_UNIX) as mute:
        await mute.bind(f"{folder}/mute.sock")
        mute.listen(1)
        with pytest.raises(PeerError, match=r"not reached within 0.05 s \(no answer\)"):
            await connect(Unix(f"{folder}/mute.sock"), identity(), limit_s=0.05)


async def test_memory_is_nowhere_to_connect_to() -> None:
    with pytest.raises(ConfigError, match="inside one process"):
        await connect(Memory(), identity(), limit_s=1)
    with pytest.raises(ConfigError, match="inside one process"):
        async with listening(Memory()):
            pass


async def test_a_sockets_folder_is_made_for_this_user_alone(folder: str) -> None:
    new = f"{folder}/new"
    async with listening(Unix(f"{new}/a.sock")):
        assert stat.S_IMODE(os.stat(new).st_mode) == 0o700
    assert os.listdir(new) == []


async def test_a_folder_others_may_enter_is_refused(folder: str) -> None:
    os.chmod(folder, 0o750)
    with pytest.raises(ConfigError, match=r"others may enter .*chmod 700"):
        async with listening(Unix(f"{folder}/a.sock")):
            pass


def test_a_socket_folder_is_private_and_goes_with_its_block() -> None:
    with open_socket_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert len(folder.encode()) < 60
    assert not os.path.exists(folder)


async def test_a_dead_listeners_socket_is_taken_over_a_living_ones_is_not(
    folder: str,
) -> None:
    address = Unix(f"{folder}/a.sock")
    with trio.socket.socket(trio.socket.AF_UNIX) as dead:
        await dead.bind(address.path)
    async with listening(address) as opened:
        with pytest.raises(ConfigError, match=r"cannot listen on unix:.*in use"):
            async with listening(address):
                pass
        await meet_and_close(opened)


async def test_a_living_listener_too_busy_to_answer_keeps_its_socket(folder: str) -> None:
    address = Unix(f"{folder}/a.sock")
    with ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX))
        busy.bind(address.path)
        busy.listen(0)
        for _ in range(3):  # more than it has room for
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            caller.connect_ex(address.path)
        with pytest.raises(ConfigError, match=r"cannot listen on unix:.*in use"):
            async with listening(address):
                pass
        assert await trio.Path(address.path).is_socket()


async def test_a_file_in_the_way_is_left_alone(folder: str) -> None:
    os.mkdir(f"{folder}/a.sock")
    with pytest.raises(ConfigError, match="cannot listen on"):
        async with listening(Unix(f"{folder}/a.sock")):
            pass
    assert os.listdir(folder) == ["a.sock"]


async def test_an_error_in_the_block_leaves_as_it_is(address: Address) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with listening(address):
            raise KeyError("mine")


async def test_connections_nobody_accepted_are_closed_with_the_listener(address: Address) -> None:
    async with listening(address) as opened:
        ours = await connect(opened.address, identity(), limit_s=LIMIT_S)
    with pytest.raises((trio.EndOfChannel, PeerError)):
        await ours.frames.receive()
    await ours.frames.aclose()


def test_secrets_are_long_and_never_twice_the_same() -> None:
    assert len(new_secret()) == 32
    assert new_secret() != new_secret()


def test_a_short_secret_is_our_bug() -> None:
    said = Hello(hello.VERSION, identity().card, b"")
    with pytest.raises(AssertionError):
        hello._proof(b"short", "listener", said, b"", LEADERS.card)
