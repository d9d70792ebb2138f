"""Real models in every layout against one rank: in float64 to 1e-9, in exact numerics bit by bit.

What the ranks run is `Runner.forward`, over the thread planes, hidden states going by queues.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models import exchange
from aserve.models.decoder import Model
from aserve.models.regions import Region
from aserve.models.registry import load_model
from aserve.tensor import tokens
from aserve.tensor.ops import Linear, Ops, open_ops
from aserve.tensor.reference import ReferenceOps
from tests.models.families import saved
from tests.models.ranks import Logits, logits_of, mixed_script

Dtype = Literal["bf16", "float32"]
DENSE, MOE = "divisible", "divisible-moe"
STAGE_SIZES = (1, 2, 3, 4, 6)
SCRIPT = mixed_script()


class WideOps(ReferenceOps):
    """The twin in float64, weights included."""

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None = None, row_blocks: int = 1) -> Linear:
        bias = None if bias_N is None else bias_N.double()
        return super().pack(weight_NK.double(), bias, row_blocks)

    def embed(self, table_VH: Tensor | Linear, ids_T: Tensor) -> Tensor:
        return super().embed(table_VH, ids_T).double()


class WideModel(Model):
    """A model whose pages are float64."""

    def regions(self) -> tuple[Region, ...]:
        (region,) = super().regions()
        wide = {"dtype": torch.float64, "item_bytes": 2 * region.item_bytes}
        return (dataclasses.replace(region, **wide),)


NATIVE, WIDE = open_ops("native", 1), WideOps()


def load(name: str, layout: Layout, ops: Ops, dtype: Dtype, rank: int) -> Model:
    model = load_model(saved(name)[0], dtype=dtype, ops=ops, layout=layout, rank=rank)
    if ops is WIDE:
        model.__class__ = WideModel
    return model


def run(name: str, layout: Layout, ops: Ops, dtype: Dtype = "float32") -> Logits:
    return logits_of(Grid(layout), functools.partial(load, name, layout, ops, dtype), SCRIPT)


@functools.cache
def alone(name: str, ops: Ops, dtype: Dtype = "float32") -> Logits:
    logits = run(name, Layout(), ops, dtype)
    assert len(logits) == 17
    assert not any(rows.isnan().any() for rows in logits.values())
    return logits


def factors(n: int) -> Iterator[tuple[int, int]]:
    """(a, b) with a * b a divisor of n."""
    for a, b in itertools.product(range(1, n + 1), repeat=2):
        if n % (a * b) == 0:
            yield a, b


def dense_layouts() -> Iterator[Layout]:
    """Every way of laying out attention in a stage of up to 6 ranks, in one to three stages."""
    for pp, tp in itertools.product((1, 2, 3), STAGE_SIZES):
        for number, (dp, cp) in enumerate(factors(tp)):
            split = "zigzag" if (number + pp) % 2 else "interleave"
            yield Layout(pp=pp, tp=tp, dp=dp, cp=cp, cp_split=split)


def moe_layouts() -> Iterator[Layout]:
    """Every way of laying out experts, each beside some way of laying out attention."""
    for pp, tp in itertools.product((1, 2, 3), STAGE_SIZES[1:]):
        attention = itertools.cycle(factors(tp))
        for number, (moe_dp, ep) in enumerate(factors(tp)):
            for _ in range(pp):  # so that stages do not see the same pairs
                dp, cp = next(attention)
            split = "zigzag" if number % 2 else "interleave"
            form = "all_to_all" if number // 2 % 2 == pp % 2 else "gathered"
            axes = {"pp": pp, "tp": tp, "dp": dp, "cp": cp, "ep": ep, "moe_dp": moe_dp}
            yield Layout(**axes, cp_split=split, experts=form)  # type: ignore[arg-type]


def label(layout: Layout) -> str:
    sizes = {axis: getattr(layout, axis) for axis in ("pp", "tp", "dp", "cp", "ep", "moe_dp")}
    axes = [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
    split = [layout.cp_split] if layout.cp > 1 else []
    form = ["all_to_all"] if layout.experts == "all_to_all" else []
    return "-".join([*axes, *split, *form]) or "one"


def assert_same(got: Logits, wanted: Logits) -> None:
    assert got.keys() == wanted.keys()
    different = {key: (got[key] - wanted[key]).abs().max().item() for key in wanted}
    assert all(torch.equal(got[key], wanted[key]) for key in wanted), different


def assert_near(got: Logits, wanted: Logits, tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for key in wanted:
        worst = (got[key] - wanted[key]).abs().max().item()
        assert worst <= tolerance, (key, worst)


SWEEP = [(DENSE, layout) for layout in dense_layouts()] + [(MOE, one) for one in moe_layouts()]
swept = pytest.mark.parametrize(
    ("name", "layout"), SWEEP, ids=[f"{name}-{label(layout)}" for name, layout in SWEEP]
)


def test_the_sweep_is_wide() -> None:
    assert len({(name, label(layout)) for name, layout in SWEEP}) >= 100
    assert {layout.pp for _, layout in SWEEP} == {1, 2, 3}
    composed = [
        layout
        for name, layout in SWEEP
        if name == MOE and min(layout.pp, layout.ep, layout.moe_dp) > 1
    ]
    assert any(layout.dp > 1 for layout in composed)
    assert any(layout.cp > 1 for layout in composed)
    assert {layout.experts for layout in composed} == {"gathered", "all_to_all"}
    assert {layout.cp_split for _, layout in SWEEP if layout.cp > 1} == {"interleave", "zigzag"}


@pytest.mark.slow
@swept
def test_exact_logits_are_those_of_one_rank_bit_by_bit(name: str, layout: Layout) -> None:
    assert_same(run(name, layout, NATIVE), alone(name, NATIVE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("divisible", Layout(tp=6, dp=2)),
        ("divisible", Layout(pp=2, tp=4, cp=2)),
        ("divisible-moe", Layout(tp=4, dp=2, ep=2, moe_dp=2)),
        ("divisible-moe", Layout(tp=6, cp=2, ep=3, experts="all_to_all")),
    ],
)
def test_bfloat16_logits_are_those_of_one_rank_bit_by_bit(name: str, layout: Layout) -> None:
    assert_same(run(name, layout, NATIVE, "bf16"), alone(name, NATIVE, "bf16"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (DENSE, Layout(tp=2)),
        (DENSE, Layout(tp=6, dp=3)),
        (DENSE, Layout(pp=2, tp=4, cp=2, cp_split="zigzag")),
        (MOE, Layout(tp=4, dp=2, ep=2)),
        (MOE, Layout(tp=6, ep=3, moe_dp=2, dp=6)),
        (MOE, Layout(tp=4, dp=2, ep=2, experts="all_to_all")),
        (MOE, Layout(tp=6, dp=6, ep=3, moe_dp=2, experts="all_to_all")),
    ],
)
def test_rows_that_are_added_up_in_rounds_have_the_same_bits(
    name: str, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = alone(name, NATIVE)
    calls: list[int] = []

    def few(row_bytes: int) -> int:
        calls.append(row_bytes)
        return 2

    for module in (tokens, exchange):
        monkeypatch.setattr(module, "rows_max", few)
    assert_same(run(name, layout, NATIVE), wanted)
    assert calls


@pytest.mark.slow
def test_stages_may_have_unequal_numbers_of_layers() -> None:
    layout = Layout(pp=2, tp=2, layers=(2, 1))
    assert_same(run(DENSE, layout, NATIVE), alone(DENSE, NATIVE))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-one-kv-head", Layout(tp=4)),  # copied to all
        ("llama-one-kv-head", Layout(pp=2, tp=4, cp=2, dp=2)),
        ("llama", Layout(tp=4)),  # each of two KV heads on two ranks
        ("qwen3-tied", Layout(pp=2, tp=8, dp=2)),
        ("divisible", Layout(tp=8, dp=2)),  # shares of an MLP are not equal
        ("qwen3-moe", Layout(tp=4, dp=2, ep=2)),
        ("qwen3-moe", Layout(tp=6, dp=6, ep=2, experts="all_to_all")),  # experts in 3 parts
        ("mixtral", Layout(tp=4, cp=4, ep=4)),
    ],
)
def test_fast_numerics_take_layouts_that_do_not_divide_the_blocks(
    name: str, layout: Layout
) -> None:
    fast = msgspec.structs.replace(layout, numerics="fast")
    assert_near(run(name, fast, NATIVE), alone(name, NATIVE), 1e-3)
    assert_near(run(name, fast, WIDE), alone(name, WIDE), 1e-9)


@pytest.mark.slow
@swept
def test_float64_logits_are_those_of_one_rank(name: str, layout: Layout) -> None:
    assert_near(run(name, layout, WIDE), alone(name, WIDE), 1e-9)
