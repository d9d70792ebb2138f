"""Quantised weights for tests: random blocks of GGUF, and blocks of chosen integers."""

import gguf
import numpy as np
import torch
from gguf import quants

from aserve.tensor.ops import BlockKind

KINDS: tuple[BlockKind, ...] = ("Q8_0", "Q4_0", "Q4_1")


def random_blocks(kind: BlockKind, n: int, k: int) -> torch.Tensor:
    """uint8 [n, row bytes]: normal values as the gguf package quantises them."""
    weight = torch.randn(n, k).numpy()
    return torch.from_numpy(quants.quantize(weight, gguf.GGMLQuantizationType[kind]))


def dequantised(blocks: torch.Tensor, kind: BlockKind) -> torch.Tensor:
    """float32 [n, k], as the gguf package has it."""
    return torch.from_numpy(quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


def blocks_of(kind: BlockKind, q_NK: torch.Tensor, d: float, m: float = 0.0) -> torch.Tensor:
    """Blocks of integers as they are stored (nibbles for Q4), all of one scale and minimum."""
    n = len(q_NK)
    q = q_NK.numpy().reshape(-1, 32)
    if kind == "Q8_0":
        body = q.astype(np.int8).view(np.uint8)
    else:
        body = (q[:, :16] | q[:, 16:] << 4).astype(np.uint8)
    values = (d, m) if kind == "Q4_1" else (d,)
    head = np.tile(np.array(values, np.float16).view(np.uint8), (len(q), 1))
    return torch.from_numpy(np.concatenate([head, body], axis=1).reshape(n, -1))
