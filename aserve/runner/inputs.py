"""The tensors of one step on one rank, from its plan: as few calls as there are tensors."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aserve.core.replica import RowsView
from aserve.tensor.ops import Attend, paths_of, tree_of
from aserve.tensor.tokens import Seat, Tokens

Ints = npt.NDArray[np.int32]


class PageTables:
    """The page tables of a DP group's sequences as rows of one array, so that a step can gather
    them. A sequence keeps its row from its first step to its drop; pages are only ever appended.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._table: Ints = np.zeros((16, 16), dtype=np.int32)
        self._rows: dict[int, int] = {}
        self._free = list(range(15, -1, -1))
        self._lengths: dict[int, int] = {}

    def drop(self, seq: int) -> None:
        """Those of other groups, of which nothing is known here, too."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row)
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

    def gather(self, rows_N: Ints, pages_max: int) -> Ints:
        """[N, pages_max], a copy."""
        if pages_max > self._table.shape[1]:
            self._grow(1, pages_max)
        return self._table[:, :pages_max].take(rows_N, axis=0)


def tokens_of(views: Sequence[RowsView], seat: Seat) -> Tokens:
    """Where the rows of a plan are, its groups in order."""
    lengths: list[list[int]] = [[] for _ in range(seat.grid.dp)]
    for view in views:
        lengths[view.group].append(len(view.rows.tokens))
    return Tokens(seat, lengths)


class StepInputs:
    """What the model takes beside `tokens`: `ids_G` of all groups, `attend` of the rank's own.

    `views` are those of `tokens`. `last_rows[n]` is the last row of view n, by its number in the
    plan. Views in `lagging` have one row each, whose token is filled in later.
    """

    __slots__ = ("_lagging_rows", "attend", "ids_G", "lagging", "last_rows")

    def __init__(self, views: Sequence[RowsView], tables: PageTables, tokens: Tokens) -> None:
        seat, order_G = tokens.seat, tokens.order_G
        ids: list[int] = []
        self.last_rows: list[int] = []
        self.lagging: list[RowsView] = []
        lagging_rows: list[int] = []
        for view in views:
            if view.rows.is_lagging:
                self.lagging.append(view)
                lagging_rows.append(len(ids))
            ids += view.rows.tokens
            self.last_rows.append(len(ids) - 1)
        ids_G = np.array(ids, dtype=np.int64)
        self._lagging_rows = np.array(lagging_rows, dtype=np.int64)
        if order_G is not None:
            ids_G = ids_G[order_G]
            self._lagging_rows = np.argsort(order_G)[self._lagging_rows]
        self.ids_G = torch.from_numpy(ids_G)
        if seat.grid.dp > 1:
            views = [view for view in views if view.group == seat.place.dp]
        self.attend = _attend(views, tables, tokens)

    def fill_in(self, drawn: Sequence[int]) -> None:
        """The tokens of `lagging`, in its order."""
        self.ids_G.numpy()[self._lagging_rows] = drawn


def _attend(views: Sequence[RowsView], tables: PageTables, tokens: Tokens) -> Attend:
    """Queries are the rank's own rows, keys those of its whole group."""
    counts = [view.n_rows for view in views]
    kv_lens = [view.kv_len for view in views]
    rows = [tables.update(view.rows.seq, view.state.pages) for view in views]
    # Weights went through the caches since the last step: lists are read at once, while every
    # other call of numpy has to be fetched.
    kv_len_N, rows_N = _ints([kv_lens, rows])
    slots_T, positions_T = _ints(
        [
            [slot for view in views for slot in view.slots()],
            [position for view in views for position in view.positions()],
        ]
    )
    row_start_M = _ints(list(itertools.accumulate(counts, initial=0)))
    paths = _paths(views)
    if tokens.seat.grid.cp > 1:
        # KV comes from all cp ranks, queries are those rows that were cut for this one.
        slots_T = slots_T[tokens.group_order]
        positions_T = positions_T[tokens.local_order]
        paths = None if paths is None else [paths[row] for row in tokens.local_order.tolist()]
        owner_T = np.repeat(np.arange(len(views)), counts)[tokens.local_order]
        np.cumsum(np.bincount(owner_T, minlength=len(views)), out=row_start_M[1:])
    page_table_NP = tables.gather(rows_N, -(-max(kv_lens, default=1) // tables.page_size))
    return Attend(
        slots_T=torch.from_numpy(slots_T),
        positions_T=torch.from_numpy(positions_T),
        page_table_NP=torch.from_numpy(page_table_NP),
        row_start_M=torch.from_numpy(row_start_M),
        kv_len_N=torch.from_numpy(kv_len_N),
        tree=None if paths is None else tree_of(paths),
    )


def _paths(views: Sequence[RowsView]) -> list[list[int]] | None:
    """Of each row in its tree, empty where rows are a chain; None: all are."""
    if not any(_is_tree(view) for view in views):
        return None
    paths: list[list[int]] = []
    for view in views:
        paths += paths_of(view.rows.parents) if _is_tree(view) else [[]] * len(view.rows.tokens)
    return paths


def _is_tree(view: RowsView) -> bool:
    """A tree in which every row is its predecessor's child is a chain like any other."""
    parents = view.rows.parents
    return bool(parents) and parents != tuple(range(-1, len(parents) - 1))


def _ints(values: list[Any]) -> Ints:
    made: npt.NDArray[Any] = np.array(values, dtype=np.int32)
    return made
