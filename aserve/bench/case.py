"""A case of `aserve bench kernels`, and the sizes of SmolLM2-135M that all of them share.

A case knows the bytes it must move and the operations it must do, so its floor is computed, not
tuned. Weights and KV rotate over several copies, as the layers of a model do.
"""

import dataclasses
from collections.abc import Callable

import torch

from aserve.tensor.ops import Linear, Ops
from aserve.tensor.reference import ReferenceOps

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS = 576, 9, 3, 64, 1536, 49152, 30
PAGE_SIZE = 16
WORKING_SET_BYTES = 128 << 20  # beyond what caches keep between two visits to a layer
COPIES_MAX = 30
# Bytes of a weight: GGUF's blocks of 32 have a float16 scale, Q4_1's a float16 minimum too.
FORMAT_BYTES = {"bf16": 2.0, "q8": 34 / 32, "q4": 18 / 32, "q4m": 20 / 32}
BLOCKS = {"q8": ("Q8_0", 2), "q4": ("Q4_0", 2), "q4m": ("Q4_1", 4)}  # kind, bytes before the q


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape. `moved` in bytes and `ops` are the least any kernel could do.

    `span` is how many bytes the calls go through before they come back to the first (0: `moved`).
    `bar` bounds the time over that of `base`, or over the floor where there is no base; `limit` the
    time itself, in microseconds.
    """

    kernel: str
    shape: str
    moved: float
    ops: float  # multiplications and additions in bfloat16 products; 0: bound by bytes
    native: Callable[[], object]
    twin: Callable[[], object]
    torch: Callable[[], object] | None = None
    span: float = 0
    base: Callable[[], object] | None = None
    bar: float | None = None
    limit: float | None = None


def copies(n_bytes: float) -> int:
    """How many of so many bytes make a working set."""
    return int(max(1, min(COPIES_MAX, WORKING_SET_BYTES // n_bytes)))


def packed(ops: Ops, form: str, n: int, k: int, row_blocks: int = 1) -> Linear:
    """A random weight in that format."""
    if form == "bf16":
        return ops.pack(torch.randn(n, k).bfloat16(), row_blocks=row_blocks)
    kind, head = BLOCKS[form]
    wide = 2 + (32 if form == "q8" else 16) + (head - 2)
    blocks = torch.randint(0, 256, (n, k // 32, wide), dtype=torch.uint8)
    scales = torch.full((n, k // 32, head // 2), 0.01, dtype=torch.float16)
    blocks[:, :, :head] = scales.view(torch.uint8)
    return ops.pack_blocks(blocks.view(n, -1), kind, k, row_blocks=row_blocks)  # type: ignore[arg-type]


def pair(kernel: str, shape: str, moved: float, ops: Ops, call: Callable[[Ops], object]) -> Case:
    """A case that native and twin do with the same call."""
    twin = ReferenceOps()
    return Case(kernel, shape, moved, 0, lambda: call(ops), lambda: call(twin))
