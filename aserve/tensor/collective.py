"""What a layer asks of the other ranks of its stage, and the answer when there are none.

Only the Protocol and the one-rank case; how ranks reach each other is the layer plane's business.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """Every rank of the group makes the same calls in the same order. Sums go in rank order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, float32 or wider."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, which may differ in dim 0, joined along dim 0 in rank order."""
        ...

    def reduce_scatter(self, x: Tensor, row_counts: Sequence[int]) -> Tensor:
        """This rank's share of the sum; rank r gets `row_counts[r]` rows of dim 0."""
        ...

    def all_to_all(self, x: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        """Send the first `send_counts[0]` rows to rank 0, and so on: (rows received, counts)."""
        ...


class OneRank:
    """A group of one: every call is the identity, with the same checks as a larger group."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, row_counts: Sequence[int]) -> Tensor:
        _check_counts(x, row_counts)
        return x

    def all_to_all(self, x: Tensor, send_counts: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
        _check_counts(x, send_counts)
        return x, tuple(send_counts)


def _check_counts(x: Tensor, counts: Sequence[int]) -> None:
    if len(counts) != 1:
        raise ValueError(f"{len(counts)} counts for a group of one rank")
    if counts[0] != x.shape[0]:
        raise ValueError(f"counts say {counts[0]} rows, the tensor has {x.shape[0]}")
