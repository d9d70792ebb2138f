"""Which rank has which rows of a step: computed from the plan, the same on every rank.

group order     a group's rows as the plan has them
stage order     groups in order, of each its cp shares in order: what `rows` groups gather
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from aserve.core.layout import Grid

Indices = npt.NDArray[np.int64]


def even(total: int, n_parts: int) -> list[int]:
    """`total` in parts that differ by one at most, the first ones larger."""
    least, more = divmod(total, n_parts)
    return [least + (part < more) for part in range(n_parts)]


def shares(counts: Sequence[int], cp: int, kind: str) -> list[Indices]:
    """For each cp rank the group rows it owns, in order; `counts` are rows of each sequence.

    interleave: row j of the group is rank j % cp's. zigzag: of each sequence's 2 cp blocks rank r
    has the r-th from either end.
    """
    if kind == "interleave":
        return [np.arange(rank, sum(counts), cp) for rank in range(cp)]
    owned: list[list[int]] = [[] for _ in range(cp)]
    start = 0
    for count in counts:
        for block, n_rows in enumerate(even(count, 2 * cp)):
            owned[min(block, 2 * cp - 1 - block)] += range(start, start + n_rows)
            start += n_rows
    return [np.array(rows, dtype=np.int64) for rows in owned]


class Spread:
    """The rows of one step over the ranks of a stage. `counts_G[g]` are rows of each sequence."""

    def __init__(self, grid: Grid, counts_G: Sequence[Sequence[int]], kind: str) -> None:
        self.grid = grid
        self.shares_G = [shares(counts, grid.cp, kind) for counts in counts_G]
        self.rows_counts = [len(share) for shares_C in self.shares_G for share in shares_C]
        self.total = sum(self.rows_counts)

    def local(self, rank: int) -> Indices:
        """The rows of its group that a rank owns."""
        place = self.grid.place(rank)
        return self.shares_G[place.dp][place.cp]

    def cp_counts(self, rank: int) -> list[int]:
        return [len(share) for share in self.shares_G[self.grid.place(rank).dp]]

    def in_group_order(self, rank: int) -> Indices:
        """Where each row of the group stands among the rows gathered over its cp ranks."""
        return np.argsort(np.concatenate(self.shares_G[self.grid.place(rank).dp]), kind="stable")

    def slices(self, rank: int) -> list[int]:
        """How many of a rank's rows each of its attn_tp peers has as its slice."""
        return even(len(self.local(rank)), self.grid.attn_tp)

    @cached_property
    def tp_counts(self) -> list[int]:
        """In stage order, each row with one rank: the slices of all ranks of a stage."""
        return [count for rows in self.rows_counts for count in even(rows, self.grid.attn_tp)]
