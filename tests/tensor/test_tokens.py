"""Rows of a step on all ranks of a stage: each in its places, and back, for any counts."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.planes.layer import open_thread_planes
from aserve.tensor.ops import open_ops
from aserve.tensor.tokens import PART_BYTES_MAX, Seat, Tokens, even_shares

T = TypeVar("T")
LIMIT_S = 20.0
Lengths = list[list[int]]


class Case(NamedTuple):
    layout: Layout
    lengths: Lengths  # of each sequence of each DP group


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dp, cp, attn_tp = (draw(st.sampled_from([1, 1, 2, 3])) for _ in range(3))
    split: Any = draw(st.sampled_from(["interleave", "zigzag"]))
    layout = Layout(tp=dp * cp * attn_tp, dp=dp, cp=cp, cp_split=split)
    group = st.lists(st.sampled_from([1, 1, 1, 2, 5, 17]), max_size=4)
    return Case(layout, [draw(group) for _ in range(dp)])


@contextmanager
def seats(layout: Layout) -> Iterator[list[Seat]]:
    grid = Grid(layout)
    planes = open_thread_planes(grid, limit_s=LIMIT_S)
    for plane in planes.values():
        plane.start(0)
    yield [Seat(grid, rank, planes[rank]) for rank in range(grid.world)]


def on_all(case: Case, function: Callable[[Tokens], T]) -> list[T]:
    """What `function` returns on each rank of the stage, all at once."""
    with seats(case.layout) as every, ThreadPoolExecutor(len(every)) as pool:
        return list(pool.map(lambda seat: function(Tokens(seat, case.lengths)), every))


def order_of(tokens: Tokens) -> list[int]:
    """Plan rows in stage order."""
    return list(range(tokens.n_rows)) if tokens.order_G is None else tokens.order_G.tolist()


def ids(numbers: Sequence[int]) -> torch.Tensor:
    """[T, 2] of which each row can be told from all others."""
    return torch.tensor([[n, 1000 + n] for n in numbers], dtype=torch.float64).view(-1, 2)


def local_rows(tokens: Tokens) -> list[int]:
    """Plan rows that a rank holds."""
    return order_of(tokens)[tokens.local]


@given(cases())
@settings(max_examples=25)
def test_every_row_is_in_exactly_one_place(case: Case) -> None:
    grid = Grid(case.layout)
    n_rows = sum(map(sum, case.lengths))
    held = on_all(case, lambda tokens: (local_rows(tokens), tokens.slice(ids(local_rows(tokens)))))
    of_places = [rows for rank, (rows, _) in enumerate(held) if grid.place(rank).attn_tp == 0]
    assert sorted(row for rows in of_places for row in rows) == list(range(n_rows))
    sliced = torch.cat([part for _, part in held])
    assert sorted(sliced[:, 0].tolist()) == list(range(n_rows))


@given(cases())
@settings(max_examples=25)
def test_rows_of_a_group_stay_in_it_with_each_sequence_together_and_in_order(case: Case) -> None:
    grid = Grid(case.layout)
    group_of = [dp for dp, group in enumerate(case.lengths) for _ in range(sum(group))]
    for rank, rows in enumerate(on_all(case, local_rows)):
        assert rows == sorted(rows)
        assert {group_of[row] for row in rows} <= {grid.place(rank).dp}


@given(cases())
@settings(max_examples=25)
def test_to_local_undoes_to_global(case: Case) -> None:
    def there_and_back(tokens: Tokens) -> tuple[torch.Tensor, ...]:
        mine = ids(local_rows(tokens))
        whole = tokens.to_global(mine)
        place = tokens.seat.inside
        # Every rank adds a part of its own, in two blocks.
        parts = torch.stack((whole * (place + 1), whole))
        return mine, whole, tokens.to_local(parts)

    n = Grid(case.layout).tp
    for mine, whole, back in on_all(case, there_and_back):
        assert sorted(whole[:, 0].tolist()) == list(range(sum(map(sum, case.lengths))))
        assert torch.equal(back, mine * (n * (n + 1) // 2 + n))


@given(cases(), st.integers(1, 20))
@settings(max_examples=25)
def test_sums_in_rounds_are_those_in_one_and_no_round_has_too_many_rows(
    case: Case, step: int
) -> None:
    def added(tokens: Tokens) -> tuple[torch.Tensor, ...]:
        seat, mine = tokens.seat, ids(local_rows(tokens))
        whole = tokens.to_global(mine)

        def parts(x: torch.Tensor) -> torch.Tensor:
            assert len(x) <= step
            return torch.stack((x * (seat.inside + 1), x))

        def shared(x: torch.Tensor) -> torch.Tensor:
            assert len(x) <= step
            return torch.stack((x * (seat.place.attn_tp + 1), x))

        row_bytes = PART_BYTES_MAX // step
        return (
            mine,
            tokens.add_up(whole, parts, row_bytes),
            tokens.add_up_shared(mine, shared, row_bytes),
        )

    grid = Grid(case.layout)
    for mine, summed, shared in on_all(case, added):
        for sums, n in ((summed, grid.tp), (shared, grid.attn_tp)):
            assert torch.equal(sums, mine * (n * (n + 1) // 2 + n))


@given(cases())
@settings(max_examples=25)
def test_slices_join_to_what_was_sliced(case: Case) -> None:
    def there_and_back(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        mine = ids(local_rows(tokens))
        part = tokens.slice(mine)
        return mine, tokens.join(part), len(part), tokens.slice_counts[tokens.seat.attn_tp.rank]

    for mine, back, length, told in on_all(case, there_and_back):
        assert torch.equal(mine, back)
        assert length == told


@given(cases())
@settings(max_examples=25)
def test_kv_of_a_group_is_whole_on_each_of_its_ranks(case: Case) -> None:
    def gathered(tokens: Tokens) -> tuple[list[int], list[int]]:
        mine = ids(local_rows(tokens))[:, None, :]
        k, v = tokens.whole_sequence(mine, -mine)
        assert torch.equal(k, -v)
        n_group = sum(case.lengths[tokens.seat.place.dp])
        order = tokens.group_order.tolist() if tokens.seat.grid.cp > 1 else range(n_group)
        first = sum(map(sum, case.lengths[: tokens.seat.place.dp]))
        return k[:, 0, 0].int().tolist(), [first + row for row in order]

    for got, wanted in on_all(case, gathered):
        assert got == wanted


@given(cases(), st.data())
@settings(max_examples=25)
def test_picked_rows_come_to_every_rank_and_go_back_into_their_order(
    case: Case, data: st.DataObject
) -> None:
    totals = [sum(group) for group in case.lengths]
    n_rows = sum(totals)
    asked = sorted(data.draw(st.sets(st.integers(0, n_rows - 1)))) if n_rows else []

    def picked(tokens: Tokens) -> tuple[list[int], tuple[int, ...], list[int]]:
        found = tokens.pick(ids(local_rows(tokens)), asked)
        dp = tokens.seat.place.dp
        own = found.x_WH.split(list(found.counts))[dp]
        own = own if found.back is None else own[found.back]
        return found.x_WH[:, 0].int().tolist(), found.counts, own[:, 0].int().tolist()

    results = on_all(case, picked)
    grid = Grid(case.layout)
    for rank, (rows, counts, own) in enumerate(results):
        assert (rows, counts) == (results[0][0], results[0][1])
        assert sorted(rows) == asked
        dp = grid.place(rank).dp
        first = sum(totals[:dp])
        assert own == [row for row in asked if first <= row < first + totals[dp]]


@given(st.integers(0, 50), st.integers(1, 9))
def test_even_shares_differ_by_one_at_most(count: int, places: int) -> None:
    shares = even_shares(count, places)
    assert len(shares) == places
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(cases())
@settings(max_examples=20)
def test_kernels_and_twin_cut_alike(case: Case) -> None:
    with seats(case.layout) as every:
        for seat in every:
            native = Seat(seat.grid, seat.rank, seat.layer, open_ops("native", 1))
            assert order_of(Tokens(native, case.lengths)) == order_of(Tokens(seat, case.lengths))


def test_a_stage_of_one_rank_needs_no_plane_and_copies_nothing() -> None:
    tokens = Tokens(Seat(Grid(Layout(pp=2)), 1), [[3, 1]])
    x = ids(range(4))
    assert tokens.to_global(x) is x
    assert tokens.slice(x) is x
    assert tokens.join(x) is x
    assert tokens.to_local(x[None]).data_ptr() == x.data_ptr()
    assert tokens.pick(x, [0, 1, 2, 3]).x_WH is x


def test_a_stage_of_more_ranks_needs_a_plane() -> None:
    with pytest.raises(AssertionError):
        Seat(Grid(Layout(tp=2)), 0)


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("interleave", [[0, 2, 4, 6, 8], [1, 3, 5, 7]]),
        ("zigzag", [[0, 1, 6, 7, 8], [2, 3, 4, 5]]),  # a decode row is in the first block
    ],
)
def test_a_cut_by_hand(split: Any, rows: list[list[int]]) -> None:
    case = Case(Layout(tp=2, cp=2, cp_split=split), [[8, 1]])
    assert on_all(case, local_rows) == rows
