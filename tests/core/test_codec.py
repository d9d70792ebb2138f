"""Plans and reports survive the trip as bytes; what is no message is the peer's fault."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core import codec
from aserve.core.codec import decode_plan, decode_report, encode
from aserve.core.message import (
    Admit,
    Batch,
    Commit,
    Grammar,
    MoveKind,
    PageMove,
    PageSend,
    Result,
    Rows,
    Sampling,
    StepPlan,
    StepReport,
    TokenLogprob,
)
from aserve.errors import PeerError

numbers = st.integers(0, 2**40)
ids = st.lists(numbers, max_size=5).map(tuple)
floats = st.floats(allow_nan=False)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    temperature=floats,
    logit_bias=st.lists(st.tuples(numbers, floats), max_size=3).map(tuple),
    bad_words=st.lists(ids, max_size=3).map(tuple),
    stop_ids=ids,
    logprobs=st.integers(-1, 20),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(["regex", "choice"]), st.text()),
)
rows = st.builds(Rows, numbers, numbers, ids, ids, st.booleans(), ids)
plans = st.builds(
    StepPlan,
    numbers,
    numbers,
    st.lists(st.builds(Commit, numbers, ids, ids, st.booleans()), max_size=3).map(tuple),
    ids,
    st.lists(st.builds(PageMove, numbers, ids, ids, st.sampled_from(MoveKind))).map(tuple),
    st.lists(st.builds(Admit, numbers, ids, numbers, numbers, ids, samplings)).map(tuple),
    st.lists(st.builds(Batch, st.lists(rows, max_size=3).map(tuple)), max_size=3).map(tuple),
    st.lists(st.builds(PageSend, numbers, ids, st.booleans()), max_size=3).map(tuple),
)
logprobs = st.lists(
    st.builds(TokenLogprob, numbers, floats, st.lists(st.tuples(numbers, floats)).map(tuple)),
    max_size=3,
).map(tuple)
results = st.builds(Result, numbers, ids, ids, logprobs, logprobs, st.none() | st.text(), ids, ids)
reports = st.builds(
    StepReport,
    numbers,
    numbers,
    st.integers(0, 2**32 - 1),
    st.lists(results, max_size=3).map(tuple),
    ids,
    st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
    numbers,
    numbers,
)


@settings(max_examples=15)
@given(plan=plans)
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    assert decode_plan(encode(plan)) == plan


@settings(max_examples=15)
@given(report=reports)
def test_a_report_comes_back_as_it_was(report: StepReport) -> None:
    assert decode_report(encode(report)) == report


EMPTY_PLAN = StepPlan(0, 0, (), (), (), (), (Batch(()),), ())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"hello", msgspec.msgpack.encode({"step": 1})])
def test_garbage_is_a_peer_error_that_names_the_peer(data: bytes) -> None:
    with pytest.raises(PeerError, match="rank 3: sent a malformed message"):
        decode_report(data, "rank 3")
    with pytest.raises(PeerError, match="leader: sent a malformed message"):
        decode_plan(data)


def test_nesting_deeper_than_any_decoder_follows_is_a_peer_error() -> None:
    data = bytearray(encode(StepReport(0, 0, 0, (), (), (), 0)))
    data[0] += 1
    with pytest.raises(PeerError, match="malformed"):
        decode_report(bytes(data) + b"\x91" * 5000, "rank 3")


@settings(max_examples=15)
@given(plan=plans, cut=st.integers(1, 40))
def test_a_cut_message_is_a_peer_error(plan: StepPlan, cut: int) -> None:
    with pytest.raises(PeerError):
        decode_plan(encode(plan)[:-cut])


def test_too_long_a_message_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(EMPTY_PLAN)
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", len(data))
    assert decode_plan(data) == EMPTY_PLAN
    monkeypatch.setattr(codec, "MESSAGE_BYTES_MAX", len(data) - 1)
    with pytest.raises(PeerError, match=f"sent {len(data)} bytes"):
        decode_plan(data)
    with pytest.raises(AssertionError):
        encode(EMPTY_PLAN)


def test_an_unchanged_decode_row_costs_few_bytes() -> None:
    rows = Rows(70, 300, (1234,), (), True, ())
    plan = msgspec.structs.replace(EMPTY_PLAN, batches=(Batch((rows,) * 64),))
    assert len(encode(plan)) / 64 < 16
