"""Frames come whole and in order however the bytes come; what is no frame is the peer's fault."""

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.errors import PeerError
from aserve.wire.frames import PREFIX, Frames

BYTES_MAX = 1000


def frames_pair() -> tuple[trio.testing.MemorySendStream, Frames]:
    """What the peer writes raw, and the frames that are read from it."""
    ours, theirs = trio.testing.memory_stream_pair()
    return theirs.send_stream, Frames(ours, "rank 7", BYTES_MAX)


def framed(data: bytes) -> bytes:
    return PREFIX.pack(len(data)) + data


async def test_frames_come_back_in_order() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    sender, receiver = Frames(ours, "a", BYTES_MAX), Frames(theirs, "b", BYTES_MAX)
    sent = [b"", b"x", b"y" * BYTES_MAX, b"\0\0\0\1"]
    for data in sent:
        await sender.send(data)
    assert [await receiver.receive() for _ in sent] == sent
    await sender.aclose()
    with pytest.raises(trio.EndOfChannel):
        await receiver.receive()


@settings(max_examples=30)
@given(
    sent=st.lists(st.binary(max_size=40), max_size=6), cuts=st.lists(st.integers(1, 9), min_size=1)
)
def test_it_does_not_matter_how_the_bytes_are_cut(sent: list[bytes], cuts: list[int]) -> None:
    async def run() -> None:
        raw, frames = frames_pair()
        data, number = b"".join(framed(one) for one in sent), 0
        found: list[bytes] = []

        async def read() -> None:
            async for one in frames:
                found.append(one)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            while data:
                n_bytes = cuts[number % len(cuts)]
                await raw.send_all(data[:n_bytes])
                await trio.testing.wait_all_tasks_blocked()
                data, number = data[n_bytes:], number + 1
            raw.close()
        assert found == sent

    trio.run(run)


async def test_a_frame_too_long_is_refused_before_it_is_read() -> None:
    raw, frames = frames_pair()
    await raw.send_all(PREFIX.pack(BYTES_MAX + 1))
    with pytest.raises(PeerError, match="rank 7: announced a frame of 1001 bytes, at most 1000"):
        await frames.receive()


async def test_another_protocol_is_told_as_such() -> None:
    raw, frames = frames_pair()
    await raw.send_all(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(PeerError, match="it sent garbage, or is no peer of ours"):
        await frames.receive()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\0\0", "ended inside the length"),
        (b"\0\0\0\3", "ended after 0 of a frame's 3 bytes"),
        (b"\0\0\0\3ab", "ended after 2 of a frame's 3 bytes"),
    ],
)
async def test_an_end_inside_a_frame_is_no_end(data: bytes, said: str) -> None:
    raw, frames = frames_pair()
    await raw.send_all(data)
    raw.close()
    with pytest.raises(PeerError, match=said):
        await frames.receive()


async def test_a_frame_too_long_is_not_sent() -> None:
    _, frames = frames_pair()
    with pytest.raises(AssertionError):
        await frames.send(b"x" * (BYTES_MAX + 1))


async def test_a_cancelled_receive_keeps_what_came() -> None:
    raw, frames = frames_pair()
    for part in (b"\0\0", b"\0\4ab", b"c"):
        await raw.send_all(part)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(frames.receive)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
    await raw.send_all(b"d" + framed(b"next"))
    assert await frames.receive() == b"abcd"
    assert await frames.receive() == b"next"


async def test_after_a_cancelled_send_nothing_more_is_sent() -> None:
    ours, _ = trio.testing.lockstep_stream_pair()
    frames = Frames(ours, "rank 7", BYTES_MAX)
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(frames.send, b"abc")
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    with pytest.raises(trio.BrokenResourceError, match="half a frame"):
        await frames.send(b"def")


async def test_sending_to_who_is_gone_names_the_peer() -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    await theirs.aclose()
    frames = Frames(ours, "rank 7", BYTES_MAX)
    for _ in range(2):
        with pytest.raises(PeerError, match="rank 7: the connection was lost"):
            await frames.send(b"abc")


async def test_raw_bytes_follow_frames_also_where_they_came_with_them() -> None:
    raw, frames = frames_pair()
    await raw.send_all(framed(b"hello") + b"12345")
    assert await frames.receive() == b"hello"
    found = bytearray(7)
    assert await frames.receive_into(memoryview(found)[:2]) == 2
    assert await frames.receive_into(memoryview(found)[2:]) == 3
    await raw.send_all(b"67")
    assert await frames.receive_into(memoryview(found)[5:]) == 2
    assert found == b"1234567"
    raw.close()
    assert await frames.receive_into(memoryview(found)) == 0
