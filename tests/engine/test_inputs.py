"""A step's tensors against their definition, row by row."""

import itertools
import random

import numpy as np
import pytest

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.core.message import Admit, Rows, Sampling
from aserve.core.replica import RowsView, SequenceState
from aserve.runner.inputs import PageTables, StepInputs, tokens_of
from aserve.tensor.collective import OnlyRank
from aserve.tensor.tokens import Seat

PAGE_SIZE = 4
ALONE = Seat(Grid(Layout()), 0)


def state(seq: int, pages: list[int], n_tokens: int) -> SequenceState:
    made = SequenceState(Admit(seq, tuple(range(n_tokens)), n_tokens, 0, (), Sampling()))
    made.pages = pages
    return made


def view(of: SequenceState, start: int, n_rows: int, parents: tuple[int, ...] = ()) -> RowsView:
    tokens = tuple(range(start, start + n_rows))
    return RowsView(of, Rows(of.seq, start, tokens, parents, True, ()), 0, PAGE_SIZE)


def test_a_table_has_as_many_columns_as_are_asked_for() -> None:
    tables = PageTables(PAGE_SIZE)
    row = tables.update(1, list(range(1, 17)))
    found = tables.gather(np.array([row], dtype=np.int32), 17)
    assert found.tolist() == [[*range(1, 17), 0]]


def check(inputs: StepInputs, views: list[RowsView]) -> None:
    attend = inputs.attend
    assert inputs.ids_G.tolist() == [token for one in views for token in one.rows.tokens]
    assert attend.positions_T.tolist() == [at for one in views for at in one.positions()]
    assert attend.slots_T.tolist() == [slot for one in views for slot in one.slots()]
    assert attend.kv_len_N.tolist() == [one.kv_len for one in views]
    counts = [one.n_rows for one in views]
    assert attend.row_start_M.tolist() == [0, *np.cumsum(counts).tolist()]
    assert inputs.last_rows == [int(end) - 1 for end in np.cumsum(counts)]
    for place, one in enumerate(views):
        n_pages = -(-one.kv_len // PAGE_SIZE)
        assert attend.page_table_NP[place, :n_pages].tolist() == one.state.pages[:n_pages]
    for tensor in (attend.positions_T, attend.slots_T, attend.page_table_NP, attend.kv_len_N):
        assert str(tensor.dtype) == "torch.int32"
        assert tensor.is_contiguous()


def test_chunks_and_decode_rows_of_growing_sequences() -> None:
    dice = random.Random(0)
    tables = PageTables(PAGE_SIZE)
    states: dict[int, SequenceState] = {}
    lengths: dict[int, int] = {}
    for step in range(200):
        for seq in list(states):
            if dice.random() < 0.05:
                tables.drop(seq)
                del states[seq], lengths[seq]
        if len(states) < 40 and dice.random() < 0.6:
            states[step] = state(step, [], 1000)
            lengths[step] = 0
        views = []
        for seq in states:
            n_rows = 1 if step % 3 else dice.choice((1, 1, 5, 30))
            needed = -(-(lengths[seq] + n_rows) // PAGE_SIZE)
            pages = states[seq].pages
            pages += [dice.randrange(1000) for _ in range(needed - len(pages))]
            views.append(view(states[seq], lengths[seq], n_rows))
            lengths[seq] += n_rows
        if views:
            dice.shuffle(views)
            check(StepInputs(views, tables, tokens_of(views, ALONE)), views)


def test_a_sequence_that_comes_back_has_a_fresh_table() -> None:
    tables = PageTables(PAGE_SIZE)
    first = [view(state(1, [7, 8, 9], 100), 0, 12)]
    check(StepInputs(first, tables, tokens_of(first, ALONE)), first)
    tables.drop(1)
    again = [view(state(1, [3], 100), 0, 2)]
    check(StepInputs(again, tables, tokens_of(again, ALONE)), again)


def test_trees_stand_at_their_depths_and_see_their_paths() -> None:
    tables = PageTables(PAGE_SIZE)
    views = [
        view(state(1, [4, 2], 100), 5, 1),
        view(state(2, [9, 3, 5], 100), 6, 5, (-1, 0, 0, 2, 1)),
        view(state(3, [8, 7], 100), 2, 3),
        view(state(4, [1, 6], 100), 3, 3, (-1, 0, 1)),  # a chain
    ]
    inputs = StepInputs(views, tables, tokens_of(views, ALONE))
    check(inputs, views)
    attend = inputs.attend
    assert attend.positions_T.tolist()[1:6] == [6, 7, 7, 8, 8]
    assert attend.tree is not None
    starts, paths = attend.tree.path_start_T1.tolist(), attend.tree.paths.tolist()
    seen = [paths[a:b] for a, b in itertools.pairwise(starts)]
    assert seen == [[], [0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], *[[]] * 6]
    plain = [views[0], views[2], views[3]]
    assert StepInputs(plain, tables, tokens_of(plain, ALONE)).attend.tree is None


@pytest.mark.parametrize("cp_split", ["interleave", "zigzag"])
def test_ranks_of_context_parallelism_have_the_paths_of_their_rows(cp_split: str) -> None:
    grid = Grid(Layout(tp=2, cp=2, cp_split=cp_split))  # type: ignore[arg-type]
    views = [
        view(state(1, [4, 2], 100), 5, 2),
        view(state(2, [9, 3, 5], 100), 6, 6, (-1, 0, 0, 2, 1, 1)),
    ]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(2):
        seat = Seat(grid, rank, OnlyRank())
        tokens = tokens_of(views, seat)
        attend = StepInputs(views, PageTables(PAGE_SIZE), tokens).attend
        assert attend.tree is not None
        starts, paths = attend.tree.path_start_T1.tolist(), attend.tree.paths.tolist()
        for row, position, (a, b) in zip(
            tokens.local_order.tolist(),
            attend.positions_T.tolist(),
            itertools.pairwise(starts),
            strict=True,
        ):
            found[row, position] = paths[a:b]
    expected = [[], [], [0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 1, 5]]
    places = [5, 6, 6, 7, 7, 8, 8, 8]
    assert found == {(row, place): expected[row] for row, place in enumerate(places)}
