"""The arithmetic of layouts, and errors that say what would do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.config import Layout
from aserve.core.layout import GROUPS, Grid, findings
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


@given(pp=sizes, dp=sizes, cp=sizes, attn_tp=sizes, moe_dp=sizes, ep=sizes)
def test_groups_cover_a_stage_once_and_agree_on_their_members(
    pp: int, dp: int, cp: int, attn_tp: int, moe_dp: int, ep: int
) -> None:
    tp = dp * cp * attn_tp
    if tp % (moe_dp * ep):
        return
    grid = Grid(Layout(pp=pp, tp=tp, dp=dp, cp=cp, moe_dp=moe_dp, ep=ep))
    lengths = {
        **{"attn_tp": attn_tp, "cp": cp, "rows": dp * cp, "tp": tp, "ep": ep, "moe_dp": moe_dp},
        **{"moe_tp": grid.moe_tp, "experts": ep * grid.moe_tp},
    }
    assert lengths.keys() == GROUPS.keys()
    for name, length in lengths.items():
        met: list[int] = []
        for rank in range(grid.world):
            group = grid.group(name, rank)
            assert len(group) == length
            assert rank in group
            assert all(grid.group(name, other) == group for other in group)
            assert len({other // tp for other in group}) == 1
            met += group[:1] if rank == group[0] else ()
        assert len(met) * length == grid.world


@given(st.integers(1, 40), st.integers(1, 8))
def test_stages_are_the_layers_in_order(n_layers: int, pp: int) -> None:
    grid = Grid(Layout(pp=pp, tp=2))
    if pp > n_layers:
        with pytest.raises(ConfigError, match="do not fill"):
            grid.stage(n_layers, 0)
        return
    stages = [grid.stage(n_layers, at) for at in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(n_layers))
    shares = list(map(len, stages))
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares)


def test_an_explicit_partition_is_taken_and_checked() -> None:
    grid = Grid(Layout(pp=3, layers=(10, 12, 8)))
    assert [grid.stage(30, at) for at in range(3)] == [range(10), range(10, 22), range(22, 30)]
    with pytest.raises(ConfigError, match="10,12,8 are 30 layers, the model has 31"):
        grid.stage(31, 0)
    assert "names 3 stages, layout.pp is 2" in findings(Layout(pp=2, layers=(1, 2, 3)))[0]


@pytest.mark.parametrize("layers", [(0, 3), (3, 0), (4, -1)])
def test_a_stage_without_layers_is_refused(layers: tuple[int, ...]) -> None:
    (finding,) = findings(Layout(pp=2, layers=layers))
    assert "leaves a stage without layers" in finding


def test_each_attention_group_has_its_leader_on_the_last_stage() -> None:
    grid = Grid(Layout(pp=3, tp=8, dp=2, cp=2))
    assert [grid.leader(dp) for dp in range(2)] == [16, 20]
