"""Models over fused blocks: logits and KV of the same operations one by one, bit by bit."""

from collections.abc import Iterator

import pytest
import torch

from aserve import _native
from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.fused import Apart, Whole
from aserve.models.registry import Model, load_model
from aserve.tensor.ops import open_ops
from tests.models.families import FAMILIES, prompt, saved
from tests.models.paged import Paged
from tests.models.ranks import Logits, logits_of, mixed_script

LEVELS = ("generic", "avx2", "avx512", "amx")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.level()
    if _native.set_level(request.param) != request.param:
        _native.set_level(before)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    _native.set_level(before)


def load(name: str, fused: bool, dtype: str, layout: Layout | None = None, rank: int = 0) -> Model:
    return load_model(
        saved(name)[0],
        ops=open_ops("native", 2, fused),
        dtype=dtype,  # type: ignore[arg-type]
        layout=layout or Layout(),
        rank=rank,
    )


def run(model: Model) -> tuple[Paged, list[torch.Tensor]]:
    """Prompts, chunks and decode rows of three sequences."""
    paged = Paged(model)
    texts = [prompt(length, seed) for seed, length in enumerate((40, 9, 17))]
    logits = paged.step((0, texts[0][:13]))
    logits += paged.step((1, texts[1][:8]), (0, texts[0][13:14]), (2, texts[2][:1]))
    logits += paged.step((0, texts[0][14:]), (1, texts[1][8:]), (2, texts[2][1:]))
    return paged, logits


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_every_family_has_the_bits_of_its_operations(level: str, name: str, dtype: str) -> None:
    fused, plain = (run(load(name, fused, dtype)) for fused in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(fused[1], plain[1], strict=True))
    for a, b in zip(fused[0].kv, plain[0].kv, strict=True):
        for x, y in ((a.k_PSHD, b.k_PSHD), (a.v_PSHD, b.v_PSHD)):
            assert torch.equal(x.nan_to_num(1e9), y.nan_to_num(1e9))
            assert x.isnan().any(), "unused slots are untouched"


def test_the_way_is_chosen_when_a_model_is_loaded() -> None:
    assert isinstance(load("llama", True, "bf16").through, Whole)
    assert isinstance(load("qwen3-moe", True, "bf16").through, Apart)
    plain = load("llama", False, "bf16")
    assert plain.through == plain.one_by_one
    split = load("llama", True, "bf16", Layout(tp=2), 1)
    assert isinstance(split.through, Apart)
    twin = load_model(saved("llama")[0], ops=open_ops("reference", 1))
    assert twin.through == twin.one_by_one
    first, second = (load("llama", True, "bf16", Layout(pp=2), rank) for rank in range(2))
    assert isinstance(first.through, Whole)
    assert isinstance(second.through, Whole)


def test_a_rope_table_that_grows_between_steps_changes_nothing() -> None:
    model, texts = load("llama", True, "bf16"), prompt(60)
    whole = Paged(model).step((0, texts))[0]
    model = load("llama", True, "bf16")
    model.rotary.table = type(model.rotary.table)(model.rotary.upto(1).cos_sin_PR[:20].clone())
    paged = Paged(model)
    parts = [paged.step((0, texts[:20]))[0], paged.step((0, texts[20:]))[0]]
    assert torch.equal(torch.cat(parts), whole)


def test_another_pool_is_seen(level: str) -> None:
    model, tokens = load("qwen3", True, "bf16"), prompt(20)
    first, second = Paged(model), Paged(model, seed=5)
    wanted = first.step((0, tokens))[0]
    assert torch.equal(second.step((0, tokens))[0], wanted)
    again = first.step((1, tokens))[0]
    assert torch.equal(again, wanted)


LAYOUTS = {
    "tp": ("divisible", Layout(tp=3)),
    "tp of copied heads": ("llama-one-kv-head", Layout(tp=2, numerics="fast")),
    "dp": ("divisible", Layout(tp=4, dp=2)),
    "cp": ("divisible", Layout(tp=4, cp=2)),
    "pp": ("divisible", Layout(pp=3)),
    "pp x tp x dp": ("divisible", Layout(pp=2, tp=4, dp=2)),
    "experts": ("divisible-moe", Layout(tp=4, dp=2, ep=2)),
    "experts, all to all": ("divisible-moe", Layout(tp=4, cp=2, ep=2, experts="all_to_all")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_every_layout_has_the_bits_of_its_operations(name: str, dtype: str) -> None:
    family, layout = LAYOUTS[name]
    script = mixed_script()

    def logits(fused: bool) -> Logits:
        return logits_of(
            Grid(layout), lambda rank: load(family, fused, dtype, layout, rank), script
        )

    fused, plain = logits(True), logits(False)
    assert fused.keys() == plain.keys()
    assert all(torch.equal(fused[key], plain[key]) for key in plain)
