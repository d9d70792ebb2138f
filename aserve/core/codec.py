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


class _PlanDown(msgspec.Struct, frozen=True, array_like=True, tag=0):
    message: StepPlan


class _AskStateDown(msgspec.Struct, frozen=True, array_like=True, tag=1):
    message: AskState


class _SetupDown(msgspec.Struct, frozen=True, array_like=True, tag=2):
    message: Setup


class _EndDown(msgspec.Struct, frozen=True, array_like=True, tag=3):
    message: End


class _ReportUp(msgspec.Struct, frozen=True, array_like=True, tag=0):
    message: StepReport


class _StateUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    message: RankState


class _ReadyUp(msgspec.Struct, frozen=True, array_like=True, tag=2):
    message: Ready


class _ByeUp(msgspec.Struct, frozen=True, array_like=True, tag=3):
    message: Bye


# The tag that a message travels with; one direction's tags mean nothing in the other.
_DOWN: dict[type, Callable[..., msgspec.Struct]] = {
    StepPlan: _PlanDown,
    AskState: _AskStateDown,
    Setup: _SetupDown,
    End: _EndDown,
}
_UP: dict[type, Callable[..., msgspec.Struct]] = {
    StepReport: _ReportUp,
    RankState: _StateUp,
    Ready: _ReadyUp,
    Bye: _ByeUp,
}

_Down: TypeAlias = _PlanDown | _AskStateDown | _SetupDown | _EndDown
_Up: TypeAlias = _ReportUp | _StateUp | _ReadyUp | _ByeUp

_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_report_decoder = msgspec.msgpack.Decoder(StepReport)
_down_decoder: msgspec.msgpack.Decoder[_Down] = msgspec.msgpack.Decoder(_Down)
_up_decoder: msgspec.msgpack.Decoder[_Up] = msgspec.msgpack.Decoder(_Up)


def encode_plan(plan: StepPlan) -> bytes:
    return _bounded(_encoder.encode(plan))


def encode_report(report: StepReport) -> bytes:
    return _bounded(_encoder.encode(report))


def encode_down(message: Down) -> bytes:
    return _bounded(_encoder.encode(_DOWN[type(message)](message)))


def encode_up(message: Up) -> bytes:
    return _bounded(_encoder.encode(_UP[type(message)](message)))


def decode_plan(data: bytes, peer: str = "leader") -> StepPlan:
    """Raises PeerError if `data` is too long or is no plan."""
    return _decode(_plan_decoder.decode, data, peer)


def decode_report(data: bytes, peer: str = "rank") -> StepReport:
    """Raises PeerError if `data` is too long or is no report."""
    return _decode(_report_decoder.decode, data, peer)


def decode_down(data: bytes, peer: str = "leader") -> Down:
    """Raises PeerError if `data` is too long or nothing that a leader says."""
    return _decode(_down_decoder.decode, data, peer).message


def decode_up(data: bytes, peer: str = "rank") -> Up:
    """Raises PeerError if `data` is too long or nothing that a rank says."""
    return _decode(_up_decoder.decode, data, peer).message


def _bounded(data: bytes) -> bytes:
    assert len(data) <= MESSAGE_BYTES_MAX, len(data)
    return data


def _decode(decode: Callable[[bytes], Message], data: bytes, peer: str) -> Message:
    if len(data) > MESSAGE_BYTES_MAX:
        raise PeerError(peer, f"sent {len(data)} bytes, at most {MESSAGE_BYTES_MAX} are accepted")
    try:
        return decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:  # also what is nested in surplus fields
        raise PeerError(peer, f"sent a malformed message: {error}") from error
