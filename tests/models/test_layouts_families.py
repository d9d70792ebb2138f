"""Exact numerics in every family and file format: biases, norms, tied heads, experts, blocks."""

import functools
import pathlib

import pytest
from gguf import GGMLQuantizationType as Kind

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.decoder import Model
from aserve.models.divide import check_layout
from aserve.models.registry import load_model, load_spec
from aserve.tensor.ops import open_ops
from tests.models.families import DENSE, FAMILIES, build, saved
from tests.models.gguf_writing import write_gguf
from tests.models.ranks import Logits, logits_of, mixed_script
from tests.models.test_layouts import assert_same

pytestmark = pytest.mark.slow

NATIVE, SCRIPT = open_ops("native", 1), mixed_script()
EXPERT_LAYOUTS = (
    Layout(tp=4, dp=2, cp=2, ep=2, moe_dp=2),
    Layout(pp=2, tp=2, ep=2, experts="all_to_all"),
    Layout(pp=2, tp=2, dp=2, moe_dp=2, experts="all_to_all"),
)
DENSE_LAYOUTS = (Layout(pp=3, tp=2), Layout(tp=2, dp=2), Layout(tp=4, dp=2, cp=2))


def run(path: pathlib.Path, layout: Layout) -> Logits:
    def load(rank: int) -> Model:
        return load_model(path, dtype="bf16", ops=NATIVE, layout=layout, rank=rank)

    return logits_of(Grid(layout), load, SCRIPT)


@functools.cache
def alone(path: pathlib.Path) -> Logits:
    return run(path, Layout())


def assert_exact(path: pathlib.Path, layouts: tuple[Layout, ...]) -> None:
    spec = load_spec(path)
    served = [layout for layout in layouts if not check_layout(spec, layout)]
    assert served
    for layout in served:
        assert_same(run(path, layout), alone(path))


@pytest.mark.parametrize("name", [name for name in FAMILIES if not name.startswith("divisible")])
def test_every_family_has_the_bits_of_one_rank(name: str) -> None:
    assert_exact(saved(name)[0], DENSE_LAYOUTS if name in DENSE else EXPERT_LAYOUTS)


@pytest.mark.parametrize("name", ["llama-tied", "llama-biases", "qwen3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.BF16], ids=lambda kind: kind.name)
def test_a_file_of_blocks_has_the_bits_of_one_rank(
    name: str, kind: Kind, tmp_path: pathlib.Path
) -> None:
    oracle = saved(name)[1]
    if name == "qwen3-moe":  # llama.cpp's form of it has experts in every layer
        oracle = build(name, mlp_only_layers=[])
    path = write_gguf(oracle, tmp_path / "model.gguf", kind)
    assert_exact(path, DENSE_LAYOUTS if name in DENSE else EXPERT_LAYOUTS)
