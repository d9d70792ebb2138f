"""Who is to blame, as a rank works out that waited to the end: from what the others last wrote."""

from collections.abc import Sequence

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout
from aserve.planes.board import Call
from aserve.planes.signature import Signature
from aserve.planes.torch_watch import Seen, Watch

LIMIT_S = 0.08
PAIR, SQUARE = Grid(Layout(tp=2)), Grid(Layout(tp=4, cp=2))  # SQUARE: attn_tp 01 23, rows 02 13


class Unreachable:
    """An exchange over which nobody is ever met."""

    tagged = True

    def move(
        self, members: Sequence[int], key: int, give: Sequence[Tensor], get: Sequence[Tensor]
    ) -> None:
        raise RuntimeError("nobody is there")

    def wake(self) -> None:
        """Nobody sleeps."""


def call(rank: int, group: str, number: int = 0, n_rows: int = 4) -> Signature:
    return Signature(rank, 5, number, "all_reduce", group, "float32", (1, n_rows))


def blamed(grid: Grid, mine: Signature, *others: tuple[Signature, bool]) -> PlaneError:
    """What `mine`, waited for to the end, is told; the others wait in their calls or returned."""
    store = dist.HashStore()
    for other, waiting in others:
        seen = msgspec.json.encode(Seen(1, waiting, other))
        store.set(f"call/{other.rank}", seen.decode())
    watch = Watch(grid, mine.rank, store, Unreachable(), LIMIT_S)
    try:
        members = grid.group(mine.group, mine.rank)
        watch.explain(Call(mine, members, torch.empty(0)), "timed out", LIMIT_S)
    finally:
        watch.close()
    assert watch.failure is not None
    return watch.failure.error()


def test_an_absent_rank_is_missing_though_it_met_the_same_ranks_by_another_name() -> None:
    error = blamed(PAIR, call(0, "moe_tp"), (call(1, "attn_tp", 3), False))
    assert isinstance(error, PlaneTimeout)
    assert error.missing == (1,)
    assert "last seen: rank 1 all_reduce#3 of step 5 over attn_tp" in str(error)


@pytest.mark.parametrize(
    "other", [(call(1, "moe_tp", n_rows=5), True), (call(1, "moe_tp", 1), False)]
)
def test_a_rank_that_made_another_call_in_this_turn_or_a_later_one_differs(
    other: tuple[Signature, bool],
) -> None:
    error = blamed(PAIR, call(0, "moe_tp"), other)
    assert isinstance(error, PlaneMismatch)
    assert error.calls == (str(call(0, "moe_tp")), str(other[0]))


def test_a_rank_that_is_through_with_the_same_call_is_neither_missing_nor_different() -> None:
    mine, same = call(0, "tp"), (call(1, "tp"), False)
    error = blamed(SQUARE, mine, same, (call(2, "tp"), True), (call(3, "rows", 7), False))
    assert isinstance(error, PlaneTimeout)
    assert error.missing == (3,)


def test_who_is_late_since_it_waits_for_another_is_not_the_one_that_is_missing() -> None:
    others = (call(1, "rows"), True), (call(3, "tp", 2), False)
    error = blamed(SQUARE, call(0, "attn_tp"), *others)
    assert isinstance(error, PlaneTimeout)
    assert error.missing == (3,)
    assert "rank 1 all_reduce#0 of step 5 over rows float32 [1, 4] (waiting)" in str(error)
    assert "rank 3 all_reduce#2 of step 5 over tp float32 [1, 4] (returned)" in str(error)


def test_who_waits_for_ranks_that_made_different_calls_tells_of_these() -> None:
    clash = call(2, "attn_tp", n_rows=8), call(3, "attn_tp", n_rows=9)
    error = blamed(SQUARE, call(1, "rows"), (clash[0], True), (clash[1], True))
    assert isinstance(error, PlaneMismatch)
    assert error.calls == tuple(map(str, clash))


def test_of_ranks_that_wait_in_a_circle_the_next_is_missing_and_all_are_told_of() -> None:
    others = (call(1, "rows"), True), (call(3, "attn_tp"), True), (call(2, "rows", 3), True)
    error = blamed(SQUARE, call(0, "attn_tp"), *others)
    assert isinstance(error, PlaneTimeout)
    assert error.missing == (1,)
    for other, _ in others:
        assert f"{other} (waiting)" in str(error)
