"""The arithmetic of layouts, and errors that say what would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.config import Layout
from aserve.core.layout import Grid, findings
from aserve.errors import ConfigError

sizes = st.integers(1, 4)


@given(pp=sizes, dp=sizes, cp=sizes, attn_tp=sizes)
def test_every_rank_has_one_place_and_attn_tp_is_fastest(
    pp: int, dp: int, cp: int, attn_tp: int
) -> None:
    grid = Grid(Layout(pp=pp, tp=dp * cp * attn_tp, dp=dp, cp=cp))
    assert grid.world == pp * dp * cp * attn_tp
    places = [grid.place(rank) for rank in range(grid.world)]
    assert len(set(places)) == grid.world
    order = [(place.pp, place.dp, place.cp, place.attn_tp) for place in places]
    assert order == sorted(order)
    for rank, place in enumerate(places):
        assert grid.rank(place.pp, place.dp, place.cp, place.attn_tp) == rank


def test_experts_are_laid_out_on_the_same_ranks() -> None:
    grid = Grid(Layout(tp=8, dp=2, moe_dp=2, ep=2))
    assert (grid.attn_tp, grid.moe_tp) == (4, 2)
    experts = [(p.moe_dp, p.ep, p.moe_tp) for p in map(grid.place, range(8))]
    assert experts == [(d, e, t) for d in range(2) for e in range(2) for t in range(2)]


def test_an_impossible_layout_says_which_values_would_do() -> None:
    wrong = findings(Layout(tp=4, dp=3, moe_dp=3, ep=2))
    assert len(wrong) == 2
    assert "layout.dp in [1, 2, 4]" in wrong[0]
    assert "layout.tp in [3, 6, ...]" in wrong[0]
    assert "layout.moe_dp in [1, 2]" in wrong[1]
    with pytest.raises(ConfigError) as caught:
        Grid(Layout(tp=4, dp=3, moe_dp=3, ep=2))
    assert caught.value.findings == wrong


def test_sizes_below_one_are_named() -> None:
    assert findings(Layout(tp=0, cp=-1)) == (
        "layout.tp is 0, at least 1",
        "layout.cp is -1, at least 1",
    )
