"""What bindings of blocks take of a step and of pools: addresses, and the tensors behind them."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from aserve.tensor.addresses import kv_type, matrix, norm_weight, pages
from aserve.tensor.blocks import BlockStep
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.rope import RopeTable

Pool = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NativeStep:
    """Addresses of a step, and the tensors behind them."""

    n_rows: int
    addresses: tuple[object, ...]
    attend: Attend
    rope: RopeTable


class KnownPools:
    """What the binding takes of the pools of layers, checked again only when they are others."""

    def __init__(self) -> None:
        self._layers: tuple[KvLayer, ...] = ()
        self._pools: tuple[Pool, ...] = ()

    def of(self, kv: Sequence[KvLayer]) -> tuple[Pool, ...]:
        known = self._layers
        if len(kv) != len(known) or any(a is not b for a, b in zip(kv, known, strict=True)):
            self._pools = tuple(_pool(layer) for layer in kv)
            self._layers = tuple(kv)
        return self._pools


def _pool(layer: KvLayer) -> Pool:
    k, v = layer.k_PSHD, layer.v_PSHD
    if k.dtype is not v.dtype:
        raise ValueError(f"k pages are {k.dtype}, v pages {v.dtype}")
    return kv_type(k), k.data_ptr(), v.data_ptr(), pages(k), pages(v)


def norm_or_none(weight_H: Tensor | None, n: int) -> int:
    return 0 if weight_H is None else norm_weight(weight_H, n)


def addresses_of(step: BlockStep, x_TH: Tensor) -> tuple[object, ...]:
    assert isinstance(step, NativeStep)
    if step.n_rows != x_TH.shape[0]:
        raise ValueError(f"{x_TH.shape[0]} rows in a step of {step.n_rows}")
    return step.addresses


def rows_of(x_TH: Tensor, hidden: int) -> tuple[int, int]:
    n_rows, columns = matrix("x", x_TH)
    if columns != hidden:
        raise ValueError(f"x has {columns} columns, the block takes {hidden}")
    return n_rows, x_TH.data_ptr()
