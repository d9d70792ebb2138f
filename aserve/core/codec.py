"""What leader and ranks say as bytes: msgspec msgpack, bounded, validated on reading."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import msgspec

from aserve.core.message import AskState, Bye, End, RankState, Ready, Setup, StepPlan, StepReport
from aserve.errors import PeerError

MESSAGE_BYTES_MAX = 64 << 20

Message = TypeVar("Message")

# What goes from the leader to the ranks, and from a rank to the leader.
Down: TypeAlias = StepPlan | AskState | Setup | End
Up: TypeAlias = StepReport | RankState | Ready | Bye


_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_report_decoder = msgspec.msgpack.Decoder(StepReport)
_down_decoder: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up_decoder: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def encode(message: Down | Up) -> bytes:
    data = _encoder.encode(message)
    assert len(data) <= MESSAGE_BYTES_MAX, len(data)
    return data


def decode_plan(data: bytes, peer: str = "leader") -> StepPlan:
    """Raises PeerError if `data` is too long or is no plan."""
    return _decode(_plan_decoder.decode, data, peer)


def decode_report(data: bytes, peer: str = "rank") -> StepReport:
    """Raises PeerError if `data` is too long or is no report."""
    return _decode(_report_decoder.decode, data, peer)


def decode_down(data: bytes, peer: str = "leader") -> Down:
    """Raises PeerError if `data` is too long or nothing that a leader says."""
    return _decode(_down_decoder.decode, data, peer)


def decode_up(data: bytes, peer: str = "rank") -> Up:
    """Raises PeerError if `data` is too long or nothing that a rank says."""
    return _decode(_up_decoder.decode, data, peer)


def _decode(decode: Callable[[bytes], Message], data: bytes, peer: str) -> Message:
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerError(peer, f"sent {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are accepted")
    try:
        return decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # also what is nested in surplus fields
        raise PeerError(peer, f"sent a malformed message: {error}") from error
