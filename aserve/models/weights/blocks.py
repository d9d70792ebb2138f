"""Blocks of 32 quantised values, the layouts of ggml that `Ops.pack_blocks` takes, and what becomes
them without loss of quants. A matrix in blocks is uint8 [rows, row bytes]."""

import numpy as np
from gguf.quants import Q4_K

from aserve.tensor.ops import BlockKind

BLOCK = 32  # values
BLOCK_BYTES: dict[BlockKind, int] = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}
# What the types of a GGUF file that are kept in blocks become.
KEPT: dict[str, BlockKind] = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q4_K": "Q4_1"}
FOUR_BITS = {"Q4_0", "Q4_1"}

Q4_K_BYTES, Q4_K_PARTS, SCALE_BYTES = 144, 8, 12


def row_bytes(kind: BlockKind, k: int) -> int:
    return k // BLOCK * BLOCK_BYTES[kind]


def columns(blocks_NB: np.ndarray, kind: BlockKind, part: slice) -> np.ndarray:
    """Columns [start, stop) of a matrix in blocks, both multiples of 32."""
    assert part.start % BLOCK == 0, part
    assert part.stop % BLOCK == 0, part
    return blocks_NB[:, row_bytes(kind, part.start) : row_bytes(kind, part.stop)]


def q4_1_of_q4_0(blocks_NB: np.ndarray) -> np.ndarray:
    """d * (q - 8) as d * q - 8 d: the same numbers. Raises ValueError if -8 d is too large."""
    blocks = blocks_NB.reshape(-1, BLOCK_BYTES["Q4_0"])
    out = np.empty((len(blocks), BLOCK_BYTES["Q4_1"]), np.uint8)
    out[:, :2], out[:, 4:] = blocks[:, :2], blocks[:, 2:]
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    out[:, 2:4] = _halves(-8 * scale)
    return out.reshape(len(blocks_NB), -1)


def q4_1_of_q4_k(raw_NB: np.ndarray) -> np.ndarray:
    """Each eighth of a Q4_K block of 256, d * sc * q - dmin * mn, as a block with d * sc and
    -dmin * mn rounded to float16. Raises ValueError if one of them is too large for that."""
    raw = raw_NB.reshape(-1, Q4_K_BYTES)
    count = len(raw)
    halves = np.ascontiguousarray(raw[:, :4]).view(np.float16).astype(np.float32)
    scale, least = Q4_K.get_scale_min(np.ascontiguousarray(raw[:, 4 : 4 + SCALE_BYTES]))
    out = np.empty((count, Q4_K_PARTS, BLOCK_BYTES["Q4_1"]), np.uint8)
    out[..., 0:2] = _halves(halves[:, :1] * scale).reshape(count, Q4_K_PARTS, 2)
    out[..., 2:4] = _halves(-(halves[:, 1:] * least)).reshape(count, Q4_K_PARTS, 2)
    # 32 bytes hold two eighths, one in their low and one in their high nibbles; a block holds its
    # first 16 values in the low nibbles of 16 bytes, the others in the high ones.
    quants = raw[:, 4 + SCALE_BYTES :].reshape(count, Q4_K_PARTS // 2, 2, 16)
    first, second = quants[:, :, 0], quants[:, :, 1]
    out[:, 0::2, 4:] = first & 15 | second << 4
    out[:, 1::2, 4:] = first >> 4 | second & 0xF0
    return out.reshape(len(raw_NB), -1)


def _halves(values: np.ndarray) -> np.ndarray:
    """The bytes of float16 values, [values, 2]."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError("has a scale that is not a finite float16")
    return np.ascontiguousarray(halves).view(np.uint8).reshape(-1, 2)
