"""Plans and reports as bytes: msgspec msgpack, bounded, validated on reading."""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from aserve.core.message import StepPlan, StepReport
from aserve.errors import PeerError

MESSAGE_BYTES_MAX = 64 << 20

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_report_decoder = msgspec.msgpack.Decoder(StepReport)


def encode_plan(plan: StepPlan) -> bytes:
    return _bounded(_encoder.encode(plan))


def encode_report(report: StepReport) -> bytes:
    return _bounded(_encoder.encode(report))


def decode_plan(data: bytes, peer: str = "leader") -> StepPlan:
    """Raises PeerError if `data` is too long or is no plan."""
    return _decode(_plan_decoder.decode, data, peer)


def decode_report(data: bytes, peer: str = "rank") -> StepReport:
    """Raises PeerError if `data` is too long or is no report."""
    return _decode(_report_decoder.decode, data, peer)


def _bounded(data: bytes) -> bytes:
    assert len(data) <= MESSAGE_BYTES_MAX, len(data)
    return data


def _decode(decode: Callable[[bytes], Message], data: bytes, peer: str) -> Message:
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerError(peer, f"sent {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are accepted")
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise PeerError(peer, f"sent a malformed message: {error}") from error
