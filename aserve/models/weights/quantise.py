"""Numbers to blocks of 32: Q8_0 and Q4_1 as ggml lays them out, with scales chosen here.

Both are pure functions of a block's own values, so a share of a matrix has the blocks of the whole.
"""

from typing import NamedTuple

import numpy as np

from aserve.models.weights.blocks import BLOCK, BLOCK_BYTES, row_bytes

ROUNDS = 2  # of least squares
MOST_8, MOST_4 = 127, 15
F32, F16 = np.float32, np.float16


def to_q8_0(values_NK: np.ndarray) -> np.ndarray:
    """float32 [n, k] to uint8 [n, row bytes].

    d is the least float16 of at least max |x| / 127; q is x * (1 / d) in float32, rounded half to
    even: no value moves by more than d / 2. Raises ValueError for values that are not finite, or
    are too large.
    """
    x = _blocks(values_NK)
    scale = _up(np.abs(x).max(1) / F32(MOST_8))
    quants = np.clip(np.rint(x * _inverse(scale)), -MOST_8, MOST_8)
    out = np.empty((len(x), BLOCK_BYTES["Q8_0"]), np.uint8)
    out[:, :2] = _bytes(scale)
    out[:, 2:] = quants.astype(np.int8).view(np.uint8)
    return out.reshape(len(values_NK), row_bytes("Q8_0", values_NK.shape[1]))


class Fit(NamedTuple):
    """Blocks as d * q + m: float16 [B] and [B], quants as float32 [B, 32], squared error [B]."""

    scale: np.ndarray
    least: np.ndarray
    quants: np.ndarray
    error: np.ndarray


def to_q4_1(values_NK: np.ndarray) -> np.ndarray:
    """float32 [n, k] to uint8 [n, row bytes].

    First m is the greatest float16 of at most min x, d the least of at least (max x - m) / 15, and
    q is (x - m) * (1 / d) in float32, rounded half to even: no value moves by more than d / 2. Then
    d and m are `ROUNDS` times fitted to q by least squares, rounded to float16, and q taken anew;
    of all these the one with the least sum of squared errors stays, the first of equals. Raises
    ValueError as `to_q8_0`.
    """
    x = _blocks(values_NK)
    least = _down(x.min(1))
    best = last = _fit(x, _up((x.max(1) - least.astype(F32)) / F32(MOST_4)), least)
    for _ in range(ROUNDS):
        last = _fit(x, *_least_squares(x, last.quants))
        is_better = last.error < best.error  # never where a scale has overflowed
        best = Fit(
            *(
                np.where(is_better.reshape(-1, *[1] * (new.ndim - 1)), new, old)
                for new, old in zip(last, best, strict=True)
            )
        )
    out = np.empty((len(x), BLOCK_BYTES["Q4_1"]), np.uint8)
    out[:, :2], out[:, 2:4] = _bytes(best.scale), _bytes(best.least)
    nibbles = best.quants.astype(np.uint8)
    out[:, 4:] = nibbles[:, : BLOCK // 2] | nibbles[:, BLOCK // 2 :] << 4
    return out.reshape(len(values_NK), row_bytes("Q4_1", values_NK.shape[1]))


def _blocks(values_NK: np.ndarray) -> np.ndarray:
    if not np.isfinite(values_NK).all():
        raise ValueError("holds numbers that are not finite")
    return values_NK.reshape(-1, BLOCK)


def _fit(x: np.ndarray, scale: np.ndarray, least: np.ndarray) -> Fit:
    wide = least.astype(F32)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        quants = np.clip(np.rint((x - wide) * _inverse(scale)), 0, MOST_4)
        off = x - (quants * scale.astype(F32)[:, None] + wide)
        error = np.einsum("bk,bk->b", off, off)
    return Fit(scale, least, quants, error)


def _least_squares(x: np.ndarray, quants: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The d and m of the line through (q, x); of equal q, d = 0 and m their mean."""
    mean_q, mean_x = quants.mean(1), x.mean(1)
    spread = quants - mean_q[:, None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        slope = np.einsum("bk,bk->b", spread, x) / np.einsum("bk,bk->b", spread, spread)
        slope = np.where(np.isfinite(slope), slope, F32(0))
        return slope.astype(F16), (mean_x - slope * mean_q).astype(F16)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / d as a column; 0 for d = 0, whose quants are then 0."""
    wide = scale.astype(F32)[:, None]
    return np.divide(F32(1), wide, out=np.zeros_like(wide), where=wide != 0)


def _up(values: np.ndarray) -> np.ndarray:
    """The least float16 that is not below."""
    with np.errstate(over="ignore"):
        halves = values.astype(F16)
    halves = np.where(halves.astype(F32) < values, np.nextafter(halves, F16(np.inf)), halves)
    if not np.isfinite(halves).all():
        raise ValueError("holds numbers that are too large for blocks")
    return halves


def _down(values: np.ndarray) -> np.ndarray:
    return -_up(-values)


def _bytes(halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)
