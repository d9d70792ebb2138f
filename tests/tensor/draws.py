"""Rows to draw from, as tests spell them."""

import numpy as np

from aserve.core.message import Sampling
from aserve.tensor.sampler import History, SampleRow


def row(
    tokens: list[int] | None = None,
    prompt_len: int = 0,
    mask: np.ndarray | None = None,
    position: int | None = None,
    **parameters: object,
) -> SampleRow:
    known = tokens or []
    history = History(Sampling(**parameters), known, prompt_len)  # type: ignore[arg-type]
    return SampleRow(history, len(known) if position is None else position, mask)


def words(allowed: set[int], vocab: int) -> np.ndarray:
    bits = np.zeros((vocab + 31) // 32 * 32, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
