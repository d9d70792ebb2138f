"""The noise hash: golden values that C++ and torch must meet, and its statistics."""

import math
from itertools import pairwise

import pytest

from aserve.core.noise import draw_key, mix32, mix64, seed_of_choice, token_bits, uniform


def test_mix64_is_the_published_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 1234567 (Rosetta Code, Vigna's C).
    state, golden = 1234567, 0x9E3779B97F4A7C15
    outputs = [mix64(state + golden * n) for n in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_golden_values() -> None:
    assert mix32(1) == 0x86D2FA73
    for seed, position, key, bits in (
        (0, 0, 0xE220A8397B1DCDAF, (0xDF5F9764, 0x86652D11, 0xA2622A1F)),
        (0, 1, 0x6E789E6AA1B965F4, (0x790517BB, 0xD412FD28, 0x1497B21D)),
        (1, 0, 0xBFEF8030DDC2D772, (0x489490A1, 0x2534C7E0, 0xB5E7F9D3)),
        (2**64 - 1, 2**31, 0xCB3A607555D8E38E, (0xA8C0D59D, 0xF683E8D6, 0xD4088580)),
        (1234567, 77, 0xA43A0A0E0591B0AC, (0x76F40068, 0x1AD4479E, 0xC0AE8CE6)),
    ):
        assert draw_key(seed, position) == key
        assert tuple(token_bits(key, token) for token in (0, 1, 151935)) == bits


def test_the_first_choice_keeps_the_requests_seed_and_others_differ() -> None:
    assert seed_of_choice(5, 0) == 5
    assert seed_of_choice(-1, 0) == 2**64 - 1
    assert seed_of_choice(5, 1) == 0x63033B0CA389C35A
    assert len({seed_of_choice(seed, choice) for seed in range(20) for choice in range(20)}) == 400


def test_uniform_stays_inside_the_open_interval() -> None:
    assert 0.0 < uniform(0) < uniform(1) < uniform(2**32 - 1) < 1.0
    assert math.isfinite(-math.log(-math.log(uniform(0))))
    assert math.isfinite(-math.log(-math.log(uniform(2**32 - 1))))


@pytest.mark.parametrize(
    "draws",
    [
        [token_bits(draw_key(3, 4), token) for token in range(20000)],
        [token_bits(draw_key(3, position), 5) for position in range(20000)],
        [token_bits(draw_key(seed, 4), 5) for seed in range(20000)],
    ],
    ids=["over tokens", "over positions", "over seeds"],
)
def test_bits_are_uniform_along_every_axis(draws: list[int]) -> None:
    n_draws, n_bins = len(draws), 64
    counts = [0] * n_bins
    for bits in draws:
        counts[bits * n_bins >> 32] += 1
    expected = n_draws / n_bins
    chi2 = sum((count - expected) ** 2 / expected for count in counts)
    assert 30 < chi2 < 110  # 63 degrees of freedom: beyond either once in some thousand
    for bit in range(32):
        assert abs(sum(draw >> bit & 1 for draw in draws) / n_draws - 0.5) < 0.02
    pairs = pairwise(draws)
    mean = sum((uniform(a) - 0.5) * (uniform(b) - 0.5) for a, b in pairs) / n_draws
    assert abs(mean * 12) < 0.03  # neighbours do not correlate


def test_gumbel_argmax_draws_from_the_softmax() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    counts = [0] * 4
    for position in range(8000):
        key = draw_key(11, position)
        gumbels = [-math.log(-math.log(uniform(token_bits(key, token)))) for token in range(4)]
        scores = [math.log(weights[token]) + gumbels[token] for token in range(4)]
        counts[scores.index(max(scores))] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count / 8000 - weight) < 0.02
