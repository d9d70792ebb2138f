"""State that a model keeps between steps, declared layer by layer and never known by model name."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch

from aserve.tensor.ops import SCALE_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """One kind of state of `layers` (global indices), an item per token, window or sequence.

    An item of one layer takes `item_bytes`. For KV it is k and v, both [heads, stored_dim] of
    `dtype`, which is what a `KvLayer` holds; `axes` split the heads.
    """

    name: str
    layers: tuple[int, ...]
    per: Literal["token", "window", "sequence"]
    axes: tuple[str, ...]
    item_bytes: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def stored_dim(self) -> int:
        """Elements that a head takes in a page: of int8 with its scale."""
        return self.head_dim + (SCALE_BYTES if self.dtype == torch.int8 else 0)


def kv_region(layers: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype) -> Region:
    region = Region("kv", layers, "token", ("attn_tp",), 0, heads, head_dim, dtype)
    item_bytes = 2 * heads * region.stored_dim * dtype.itemsize
    return dataclasses.replace(region, item_bytes=item_bytes)


KvDtype = Literal["auto", "bf16", "float32", "int8"]
KV_DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}


def stored_as(regions: Sequence[Region], kv_dtype: KvDtype) -> tuple[Region, ...]:
    """The regions of a model with their KV in another dtype; auto: as the model has it."""
    if kv_dtype == "auto":
        return tuple(regions)
    dtype = KV_DTYPES[kv_dtype]
    return tuple(kv_region(one.layers, one.heads, one.head_dim, dtype) for one in regions)
