"""The tensors of one step, built from the plan's rows with a few numpy calls however many rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aserve.core.replica import RowsView
from aserve.tensor.ops import Attend

Ints = npt.NDArray[np.int32]


class PageTables:
    """The page tables of all sequences as rows of one array, so that a step can gather them.

    A sequence keeps its row from admission to drop; pages are only ever appended.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._table: Ints = np.zeros((16, 16), dtype=np.int32)
        self._rows: dict[int, int] = {}
        self._free = list(range(15, -1, -1))
        self._lengths: dict[int, int] = {}

    def drop(self, seq: int) -> None:
        self._free.append(self._rows.pop(seq))
        del self._lengths[seq]

    def update(self, seq: int, pages: Sequence[int]) -> int:
        """Copy what `pages` has more than last time; the sequence's row."""
        row = self._rows.get(seq)
        if row is None:
            row = self._open(seq)
        known = self._lengths[seq]
        if known != len(pages):
            assert known < len(pages), seq
            if len(pages) > self._table.shape[1]:
                self._grow(1, len(pages))
            self._table[row, known : len(pages)] = pages[known:]
            self._lengths[seq] = len(pages)
        return row

    def _open(self, seq: int) -> int:
        if not self._free:
            have = self._table.shape[0]
            self._grow(0, have + 1)
            self._free.extend(range(self._table.shape[0] - 1, have - 1, -1))
        row = self._rows[seq] = self._free.pop()
        self._lengths[seq] = 0
        return row

    def _grow(self, axis: int, needed: int) -> None:
        shape = list(self._table.shape)
        while shape[axis] < needed:
            shape[axis] *= 2
        table: Ints = np.zeros(shape, dtype=np.int32)
        table[: self._table.shape[0], : self._table.shape[1]] = self._table
        self._table = table

    def gather(self, rows: Ints, pages_max: int) -> Ints:
        return np.ascontiguousarray(self._table[rows, :pages_max])


class StepInputs:
    """`tokens_T` (int64) and `attend` of the rows of `views`, in their order.

    `last_rows[n]` is the last row of view n.
    """

    __slots__ = ("attend", "last_rows", "tokens_T")

    def __init__(self, views: Sequence[RowsView], tables: PageTables) -> None:
        tokens: list[int] = []
        for view in views:
            assert not view.rows.parents, "trees of rows come with speculation"
            tokens.extend(view.rows.tokens)
        rows_N = _ints([tables.update(view.rows.seq, view.state.pages) for view in views])
        start_N = _ints([view.rows.start for view in views])
        count_N = _ints([len(view.rows.tokens) for view in views])
        kv_len_N = start_N + count_N
        pages_max = -(-int(kv_len_N.max()) // tables.page_size)
        row_start_M: Ints = np.zeros(len(views) + 1, dtype=np.int32)
        np.cumsum(count_N, out=row_start_M[1:])
        page_table_NP = tables.gather(rows_N, pages_max)
        if len(tokens) == len(views):
            positions_T, owner_T = start_N, np.arange(len(views), dtype=np.int32)
        else:
            owner_T = np.repeat(np.arange(len(views), dtype=np.int32), count_N)
            within_T = np.arange(len(tokens), dtype=np.int32) - row_start_M[owner_T]
            positions_T = start_N[owner_T] + within_T
        page_T, offset_T = np.divmod(positions_T, np.int32(tables.page_size))
        slots_T = page_table_NP[owner_T, page_T] * np.int32(tables.page_size) + offset_T
        self.last_rows: list[int] = (row_start_M[1:] - 1).tolist()
        self.tokens_T = torch.tensor(tokens, dtype=torch.int64)
        self.attend = Attend(
            slots_T=torch.from_numpy(slots_T),
            positions_T=torch.from_numpy(positions_T),
            page_table_NP=torch.from_numpy(page_table_NP),
            row_start_M=torch.from_numpy(row_start_M),
            kv_len_N=torch.from_numpy(kv_len_N),
        )


def _ints(values: list[int]) -> Ints:
    made: npt.NDArray[Any] = np.array(values, dtype=np.int32)
    return made
