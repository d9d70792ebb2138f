"""The native sampler against its twin, at every level of the processor."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve import _native
from aserve.core.message import Sampling
from aserve.tensor.sampler import Drawn, History, NativeSampler, SampleRow
from aserve.tensor.sampler_reference import ReferenceSampler
from tests.tensor.draws import row, words

INF = math.inf


@pytest.fixture
def level_restored() -> Iterator[None]:
    before = _native.level()
    yield
    _native.set_level(before)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, list[SampleRow]]:
    vocab = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 64, 100, 257, 1000]))
    count = draw(st.integers(1, 3))
    scale = draw(st.sampled_from([0.0, 0.5, 3.0, 12.0]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = (generator.standard_normal((count, vocab)) * scale).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    logits[generator.random((count, vocab)) < draw(st.sampled_from([0.0, 0.2]))] = -INF
    ids = st.integers(-1, vocab + 2)
    rows = []
    for _ in range(count):
        tokens = draw(st.lists(st.integers(0, vocab - 1), max_size=30))
        sampling = Sampling(
            seed=draw(st.integers(0, 2**64 - 1)),
            temperature=draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 1.7, 40.0])),
            top_k=draw(st.sampled_from([-1, 0, 1, 2, 7, 40, 5000])),
            top_p=draw(st.sampled_from([1.0, 0.97, 0.61, 0.1234, 1e-9])),
            min_p=draw(st.sampled_from([0.0, 0.0123, 0.4567])),
            presence_penalty=draw(st.sampled_from([0.0, 0.7, -1.3])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.4, -0.2])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.25, 0.8])),
            logit_bias=tuple(draw(st.dictionaries(ids, st.floats(-9, 9), max_size=4)).items()),
            bad_words=tuple(
                map(tuple, draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3)))
            ),
            min_tokens=draw(st.integers(0, 20)),
            stop_ids=tuple(draw(st.lists(ids, max_size=3))),
            logprobs=draw(st.sampled_from([-1, 0, 1, 5])),
        )
        allowed = draw(st.none() | st.sets(st.integers(0, vocab - 1), max_size=20))
        mask = None if allowed is None else words(allowed, vocab)
        prompt_len = draw(st.integers(0, len(tokens)))
        rows.append(SampleRow(History(sampling, tokens, prompt_len), len(tokens), mask))
    return torch.from_numpy(logits), rows


def assert_same(native: Drawn, twin: Drawn) -> None:
    assert (native.token, native.error) == (twin.token, twin.error)
    assert (native.logprob is None) == (twin.logprob is None)
    if native.logprob and twin.logprob:
        assert native.logprob.logprob == pytest.approx(twin.logprob.logprob, abs=1e-9)
        assert [token for token, _ in native.logprob.top] == [t for t, _ in twin.logprob.top]
        values = [value for _, value in twin.logprob.top]
        assert [value for _, value in native.logprob.top] == pytest.approx(values, abs=1e-9)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_native_draws_what_its_twin_draws(case: tuple[torch.Tensor, list[SampleRow]]) -> None:
    logits, rows = case
    before = logits.clone()
    twins = ReferenceSampler().sample(logits, rows)
    level_before = _native.level()
    levels = ("generic", level_before)
    try:
        for name in levels:
            _native.set_level(name)
            for native, twin in zip(NativeSampler().sample(logits, rows), twins, strict=True):
                assert_same(native, twin)
    finally:
        _native.set_level(level_before)
    assert torch.equal(logits, before)


def test_a_min_p_threshold_near_zero_is_found() -> None:
    """Here max + log(min_p) cancels to a float with a million others close by."""
    best = np.float32(-math.log(0.1))
    near = [float(best), *(float(np.float32(x)) for x in (1e-7, 1e-8, 0.0, -1e-9, -1e-7, -1e-6))]
    logits = torch.tensor(near).expand(200, -1)
    rows = [row(position=n, min_p=0.1, temperature=1.0) for n in range(200)]
    twins = ReferenceSampler().sample(logits, rows)
    assert NativeSampler().sample(logits, rows) == twins
    assert {one.token for one in twins} == {0, 1}  # the threshold is 3.2e-8


@pytest.mark.slow
@pytest.mark.usefixtures("level_restored")
@pytest.mark.parametrize("level", ["generic", "avx512"])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"temperature": 0.0, "logprobs": 5},
        {"top_k": 50},
        {"top_p": 0.9, "logprobs": 20},
        {"top_p": 0.99, "temperature": 3.0},
        {"top_k": 200, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2},
    ],
)
def test_native_draws_what_its_twin_draws_over_a_whole_vocabulary(
    level: str, parameters: dict[str, float]
) -> None:
    if _native.set_level(level) != level:
        pytest.skip(f"this machine has no {level}")
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 49152, generator=generator) * 3
    rows = [row([7, 8, 9], 1, seed=seed, **parameters) for seed in range(6)]
    twins = ReferenceSampler().sample(logits, rows)
    for native, twin in zip(NativeSampler().sample(logits, rows), twins, strict=True):
        assert_same(native, twin)
