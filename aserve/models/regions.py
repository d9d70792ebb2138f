"""State that a model keeps between steps, declared layer by layer and never known by model name."""

import dataclasses
from typing import Literal

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """One kind of state of `layers` (global indices), an item per token, window or sequence.

    An item of one layer takes `item_bytes`. For KV it is k and v, both
    [heads, head_dim] of `dtype`, which is what a `KvLayer` holds; `axes` split the heads.
    """

    name: str
    layers: tuple[int, ...]
    per: Literal["token", "window", "sequence"]
    axes: tuple[str, ...]
    item_bytes: int
    heads: int
    head_dim: int
    dtype: torch.dtype


def kv_region(layers: tuple[int, ...], heads: int, head_dim: int, dtype: torch.dtype) -> Region:
    item_bytes = 2 * heads * head_dim * dtype.itemsize
    return Region("kv", layers, "token", ("attn_tp",), item_bytes, heads, head_dim, dtype)
