"""Numbers to blocks: error bounds block by block, what is reproduced exactly, what is refused."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from aserve.models.weights.quantise import to_q4_1, to_q8_0

CONVERTERS = {"Q8_0": to_q8_0, "Q4_1": to_q4_1}
both = pytest.mark.parametrize("kind", list(CONVERTERS))


def back(blocks: np.ndarray, kind: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        return gguf.dequantize(blocks, Kind[kind])


def again(values: np.ndarray, kind: str) -> np.ndarray:
    return back(CONVERTERS[kind](values), kind)


def half(blocks: np.ndarray, at: int, kind: str) -> np.ndarray:
    """float16 at a byte of each block, as float64 [blocks, 1]."""
    parts = blocks.reshape(-1, {"Q8_0": 34, "Q4_1": 20}[kind])[:, at : at + 2]
    return np.ascontiguousarray(parts).view(np.float16).astype(np.float64)


def sets() -> dict[str, np.ndarray]:
    """float32 [rows, 64] of many shapes and sizes."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal((40, 64))
    spans = 10.0 ** rng.uniform(-6, 3, (40, 1))
    outlier = normal * 0.02
    outlier[:, 5] = 3.0
    made = {
        "normal": normal * 0.05,
        "spans": normal * spans,
        "uniform": rng.uniform(-1, 1, (40, 64)),
        "far from zero": 10 + normal * 1e-3,
        "all negative": -np.abs(normal) - 0.5,
        "an outlier": outlier,
        "two values": np.where(normal > 0, 0.3, -0.7),
        "one is not zero": np.where(np.arange(64) == 9, normal, 0),
        "tiny": normal * 1e-7,
        "below the least scale": normal * 1e-9,
        "large": normal * 1e4,
    }
    return {name: values.astype(np.float32) for name, values in made.items()}


SETS = sets()


@pytest.mark.parametrize("name", list(SETS))
def test_no_value_moves_by_more_than_half_a_step_of_8_bits(name: str) -> None:
    x = SETS[name]
    blocks = to_q8_0(x)
    scale = half(blocks, 0, "Q8_0")
    off = np.abs(back(blocks, "Q8_0").astype(np.float64) - x).reshape(-1, 32)
    assert (off <= scale / 2 * (1 + 1e-5)).all()
    largest = np.abs(x).reshape(-1, 32).max(1, keepdims=True)
    # A scale is the least float16 that reaches the largest value.
    assert (scale <= np.maximum(largest / 127 * (1 + 2**-10), largest / 127 + 2**-24)).all()


@pytest.mark.parametrize("name", list(SETS))
def test_4_bits_are_no_worse_than_the_even_spacing_of_least_to_greatest(name: str) -> None:
    x = SETS[name].reshape(-1, 32).astype(np.float64)
    got = again(SETS[name], "Q4_1").reshape(-1, 32)
    least, greatest = x.min(1, keepdims=True), x.max(1, keepdims=True)
    # Of the spacing that float16 can hold: from at most a step of float16 below the least.
    ulp = np.maximum(np.abs(least) * 2**-10, 2**-24)
    step = (greatest - least + ulp) / 15 * (1 + 2**-10) + 2**-24
    even = 32 * (step / 2) ** 2
    assert (np.square(got - x).sum(1, keepdims=True) <= even * (1 + 1e-4)).all()


def test_least_squares_lower_the_error_of_ggml_s_own_blocks() -> None:
    x = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    theirs = back(gguf.quantize(x, Kind.Q4_1), "Q4_1")
    mine = again(x, "Q4_1")
    assert np.square(mine - x).mean() < 0.9 * np.square(theirs - x).mean()


def test_refined_blocks_are_never_worse_than_the_first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    refined = {name: again(x, "Q4_1") for name, x in SETS.items()}
    monkeypatch.setattr("aserve.models.weights.quantise.ROUNDS", 0)
    for name, x in SETS.items():
        first = again(x, "Q4_1")
        errors = [
            np.square(y.astype(np.float64) - x).reshape(-1, 32).sum(1)
            for y in (refined[name], first)
        ]
        assert (errors[0] <= errors[1] * (1 + 1e-4) + 1e-30).all(), name


def test_rounding_is_half_to_even() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = 127, 0.5, 1.5, 2.5, -0.5, -1.5
    assert again(x, "Q8_0")[0, :6].tolist() == [127, 0, 2, 2, 0, -2]


@both
def test_what_blocks_can_hold_comes_back(kind: str) -> None:
    """Blocks that use the whole range of quants, with any scale that is normal in float16."""
    rng = np.random.default_rng(3)
    scales = (2.0 ** rng.uniform(-13, 3, (50, 1))).astype(np.float16).astype(np.float64)
    if kind == "Q8_0":
        quants = rng.integers(-127, 128, (50, 32))
        quants[:, 3] = 127 * (1 - 2 * (np.arange(50) % 2))
        x = scales * quants
    else:
        quants = rng.integers(0, 16, (50, 32))
        quants[:, :2] = 0, 15
        least = (rng.integers(-16, 17, (50, 1)) * scales).astype(np.float16).astype(np.float64)
        x = scales * quants + least
    exact = x.astype(np.float32)
    np.testing.assert_array_equal(again(exact, kind), exact)


@both
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -0.375, 2.0**-20, 1234.0])
def test_a_constant_comes_back(kind: str, value: float) -> None:
    x = np.full((2, 64), value, np.float32)
    np.testing.assert_allclose(again(x, kind), x, rtol=2**-8 if kind == "Q8_0" else 0)


@both
def test_zeros_are_zero_and_have_no_scale(kind: str) -> None:
    assert not CONVERTERS[kind](np.zeros((3, 96), np.float32)).any()


@both
def test_scales_below_the_normal_ones_still_reach_the_largest_value(kind: str) -> None:
    x = (np.random.default_rng(5).standard_normal((64, 32)) * 3e-6).astype(np.float32)
    assert (half(CONVERTERS[kind](x), 0, kind) < 2**-14).all()
    steps = {"Q8_0": 1.5, "Q4_1": 12}[kind]  # of float16's least number
    assert np.abs(again(x, kind) - x).max() <= 2**-24 * steps


@both
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(kind: str, value: float) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = value
    with pytest.raises(ValueError, match="not finite"):
        CONVERTERS[kind](x)


@both
def test_numbers_that_no_scale_can_hold_are_refused(kind: str) -> None:
    x = np.ones((2, 64), np.float32)
    x[1, 40] = 1e8
    with pytest.raises(ValueError, match="too large"):
        CONVERTERS[kind](x)


@both
def test_a_block_depends_on_nothing_but_itself(kind: str) -> None:
    x = np.concatenate([SETS["spans"], SETS["an outlier"]])
    whole = CONVERTERS[kind](x)
    part = CONVERTERS[kind](np.ascontiguousarray(x[13:50, 32:]))
    assert np.array_equal(part, whole[13:50, whole.shape[1] // 2 :])


@both
def test_no_rows_are_no_blocks(kind: str) -> None:
    assert CONVERTERS[kind](np.zeros((0, 64), np.float32)).shape[0] == 0
