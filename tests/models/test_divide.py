"""A layout that a model cannot have is refused, with all that is wrong and what would do."""

import dataclasses
import pathlib

import pytest

from aserve.core.config import Layout
from aserve.errors import ConfigError
from aserve.models.divide import check_layout
from aserve.models.registry import load_model, load_spec
from aserve.models.spec import ModelSpec
from aserve.tensor.reference import ReferenceOps
from tests.models.families import saved


@pytest.fixture(scope="module")
def dense() -> ModelSpec:
    """The sizes of SmolLM2: 30 layers, 9 heads, 3 KV heads, MLPs of 1536 in 12 blocks."""
    spec = load_spec(saved("llama")[0])
    sizes = {"layers": 30, "heads": 9, "kv_heads": 3, "inner": 1536, "hidden": 576}
    return dataclasses.replace(spec, **sizes)


@pytest.fixture(scope="module")
def moe() -> ModelSpec:
    """6 experts of 64 columns in 2 blocks; a dense MLP of 128 in 4."""
    return load_spec(saved("qwen3-moe")[0])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(tp=3),
        Layout(pp=30),
        Layout(tp=3, dp=3),
        Layout(tp=6, cp=2),
        Layout(tp=12, dp=4),
        Layout(tp=9, numerics="fast"),
        Layout(pp=2, layers=(10, 20)),
    ],
)
def test_what_fits_is_not_refused(dense: ModelSpec, layout: Layout) -> None:
    assert check_layout(dense, layout) == []


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (Layout(tp=2), "2 ranks cannot share the 9 heads and 3 KV heads of this model"),
        (Layout(tp=2), "; what would do: 1, 3, 9"),
        (Layout(tp=9), "3 of them do not go into layout.tp / (dp * cp) = 9 ranks"),
        (Layout(tp=9), "; what would do: 1, 3, or --layout.numerics fast"),
        (Layout(tp=5, dp=5), "in 12 blocks, which do not go into layout.tp = 5 ranks"),
        (Layout(tp=5, dp=5), "would do: 1, 2, 3, 4, 6, 12, or --layout.numerics fast"),
        (Layout(pp=31), "use at most --layout.pp 30"),
        (Layout(pp=2, layers=(10, 10)), "are 20 layers, the model has 30"),
        (Layout(tp=3, dp=2), "layout.tp = 3 cannot be split by layout.dp"),
        (Layout(tp=3, ep=3), "layout.ep = 3, but this model has no experts; what would do: 1"),
        (Layout(tp=3, moe_dp=3), "layout.moe_dp = 3, but this model has no experts"),
        (Layout(tp=3, experts="all_to_all"), "all_to_all, but this model has none; leave it out"),
        (Layout(tp=1200, dp=1200), "cannot be split over layout.tp = 1200 ranks"),
    ],
)
def test_what_does_not_fit_is_told_with_what_would(
    dense: ModelSpec, layout: Layout, told: str
) -> None:
    assert any(told in finding for finding in check_layout(dense, layout))


def test_experts_and_dense_mlps_of_a_mixture_are_both_looked_at(moe: ModelSpec) -> None:
    whole = check_layout(moe, Layout(tp=4, dp=4, ep=4))
    assert [finding.split(";")[0] for finding in whole] == [
        "layout.ep = 4 ranks cannot share 6 experts"
    ]
    both = check_layout(moe, Layout(tp=8, dp=8))
    assert len(both) == 2
    assert "MLP of 128 columns in 4 blocks" in both[0]
    assert "expert of 64 columns in 2 blocks" in both[1]
    assert check_layout(moe, Layout(tp=4, dp=2, ep=2)) == []
    assert check_layout(moe, Layout(tp=8, dp=8, numerics="fast")) == []


def test_all_findings_come_together(dense: ModelSpec) -> None:
    found = check_layout(dense, Layout(pp=40, tp=10))
    assert len(found) == 3
    assert "--layout.pp 30" in found[0]
    assert "heads" in found[1]
    assert "blocks" in found[2]


def test_an_mlp_has_a_column_for_every_rank(dense: ModelSpec) -> None:
    narrow = dataclasses.replace(dense, inner=4)
    (finding,) = check_layout(narrow, Layout(tp=9, numerics="fast"))
    assert finding == "an MLP of 4 columns cannot be split over layout.tp = 9 ranks"


def test_a_model_is_not_loaded_for_a_layout_it_cannot_have() -> None:
    folder: pathlib.Path = saved("llama")[0]
    with pytest.raises(ConfigError, match="4 heads and 2 KV heads"):
        load_model(folder, ops=ReferenceOps(), layout=Layout(tp=3))
