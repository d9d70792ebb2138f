"""What a layer asks of the other ranks of its stage, and the answer when there are none.

Only the Protocols and the one-rank case; how ranks reach each other is the layer plane's business.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Collective(Protocol):
    """Every rank of the group makes the same calls in the same order.

    Tensors are contiguous and of one dtype on all ranks; what is given may be overwritten once the
    call has returned, what is returned belongs to the caller. Row counts follow from the plan, so
    every rank knows those of all, and a count may be 0. Raises PlaneMismatch where ranks make
    different calls, PlaneTimeout where one is missing, and any PlaneError once the plane is broken.
    """

    @property
    def rank(self) -> int:
        """This rank's place in the group, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, parts_B: Tensor) -> Tensor:
        """[B, ...] -> [...]: the sum over all blocks, rank by rank and in a rank block by block.

        float32 or wider, strictly from left to right: with as many blocks in all, the bits of the
        sum do not depend on how many ranks hold them.
        """
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Every rank's rows joined in rank order; rank r gives `counts[r]` of them."""
        ...

    def reduce_scatter(self, parts_B: Tensor, counts: Sequence[int]) -> Tensor:
        """[B, sum(counts), ...] -> [counts[rank], ...]: this rank's rows of `all_reduce`."""
        ...

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        """The first `send_counts[0]` rows of x go to rank 0, and so on; `receive_counts[r]` rows
        come from rank r, in rank order. Counts that depend on values are exchanged beforehand."""
        ...


class LayerPlane(Protocol):
    """One rank's end of its stage's collectives; made by aserve.planes.layer."""

    def start(self, step: int) -> None:
        """The calls that follow belong to this step. Who is at another step is a mismatch."""
        ...

    def group(self, name: str) -> Collective:
        """The ranks that meet here under a name of `core.layout.GROUPS`; always the same object."""
        ...


class OneRank:
    """A group of one: every call is the identity, with the same checks as a larger group."""

    rank = 0
    size = 1

    def all_reduce(self, parts_B: Tensor) -> Tensor:
        return sum_blocks(parts_B)

    def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        _check_counts(x.shape[0], counts)
        return x

    def reduce_scatter(self, parts_B: Tensor, counts: Sequence[int]) -> Tensor:
        _check_counts(parts_B.shape[1], counts)
        return sum_blocks(parts_B)

    def all_to_all(
        self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> Tensor:
        _check_counts(x.shape[0], send_counts)
        _check_counts(x.shape[0], receive_counts)
        return x


class OnlyRank:
    """The layer plane of a stage of one rank."""

    def __init__(self) -> None:
        self._group = OneRank()

    def start(self, step: int) -> None:
        assert step >= 0, step

    def group(self, name: str) -> Collective:
        return self._group


def sum_blocks(parts_B: Tensor) -> Tensor:
    """[B, ...] -> [...], from left to right: ((p0 + p1) + p2) + ...; B is at least 1."""
    if parts_B.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"sums are taken in float32 or float64, not {parts_B.dtype}")
    total = parts_B[0]
    for part in parts_B[1:]:
        total = total + part
    return total


def _check_counts(n_rows: int, counts: Sequence[int]) -> None:
    if len(counts) != 1:
        raise ValueError(f"{len(counts)} counts for a group of one rank")
    if counts[0] != n_rows:
        raise ValueError(f"counts say {counts[0]} rows, the tensor has {n_rows}")
