"""What leader and ranks say survives the trip as bytes, and cannot be taken for anything else."""

import msgspec
import pytest

from aserve.core import codec
from aserve.core.codec import Down, Up, decode_down, decode_up, encode
from aserve.core.message import (
    AskState,
    Batch,
    Bye,
    End,
    RankState,
    Ready,
    Setup,
    StepPlan,
    StepReport,
)
from aserve.errors import PeerError

PLAN = StepPlan(3, 1, (), (4,), (), (), (Batch(()), Batch(())), ())
DOWN: list[Down] = [
    PLAN,
    AskState(),
    Setup(),
    Setup(b"\0{}", 9, (("hidden", 1, "tcp:h:1"),)),
    End(),
]
UP: list[Up] = [
    StepReport(3, 1, 2**32 - 1, (), (4,), ((1, 2),), 5, 6),
    RankState(1, -1, 0),
    RankState(1, 2, 3, 4, "computing", "all_reduce", 7),
    Ready(1, 2, "model", 30, "abc", (("hidden", "unix:/x"),)),
    Bye(),
    Bye("ValueError: ä"),
]
IDS = {"ids": lambda message: type(message).__name__}


@pytest.mark.parametrize("message", DOWN, **IDS)
def test_what_goes_down_comes_back_as_it_was(message: Down) -> None:
    assert decode_down(encode(message)) == message
    assert type(decode_down(encode(message))) is type(message)


@pytest.mark.parametrize("message", UP, **IDS)
def test_what_goes_up_comes_back_as_it_was(message: Up) -> None:
    assert decode_up(encode(message)) == message
    assert type(decode_up(encode(message))) is type(message)


@pytest.mark.parametrize("message", DOWN, **IDS)
def test_a_cut_message_is_a_peer_error(message: Down) -> None:
    data = encode(message)
    for n_bytes in range(len(data)):
        with pytest.raises(PeerError, match="leader: sent a malformed message"):
            decode_down(data[:n_bytes])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([9, []]),
        msgspec.msgpack.encode([0]),
        msgspec.msgpack.encode([0, ["not a step"]]),
        msgspec.msgpack.encode({"message": 1}),
        msgspec.msgpack.encode([1, [0, 0, "no digest"]]),
    ],
)
def test_garbage_names_the_peer(data: bytes) -> None:
    with pytest.raises(PeerError, match="rank 3: sent a malformed message"):
        decode_up(data, "rank 3")
    with pytest.raises(PeerError, match="leader: sent a malformed message"):
        decode_down(data + b"x")


def test_a_plan_is_no_report() -> None:
    with pytest.raises(PeerError):
        decode_up(encode(PLAN))
    with pytest.raises(PeerError):
        decode_down(encode(UP[0]))


def test_a_tag_costs_a_plan_one_byte() -> None:
    untagged = msgspec.msgpack.encode(msgspec.structs.astuple(PLAN))
    assert len(encode(PLAN)) == len(untagged) + 1


def test_too_long_a_message_is_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    down, up = encode(PLAN), encode(UP[0])
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", min(len(down), len(up)) - 1)
    with pytest.raises(PeerError, match=f"sent {len(down)} bytes, at most"):
        decode_down(down)
    with pytest.raises(PeerError, match=f"sent {len(up)} bytes, at most"):
        decode_up(up)
    with pytest.raises(AssertionError):
        encode(PLAN)
    with pytest.raises(AssertionError):
        encode(UP[0])
