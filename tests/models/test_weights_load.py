"""Models with weights in blocks: what is held, how near its logits are, the same on any layout."""

import copy
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import ConfigError, ModelError
from aserve.models.decoder import Model
from aserve.models.registry import CONVERSIONS, load_model
from aserve.models.weights.quantise import to_q4_1, to_q8_0
from aserve.tensor.ops import Linear, open_ops
from aserve.tensor.reference import ReferenceOps
from tests.models.families import FAMILIES, build, oracle_greedy, oracle_logits, prompt, saved
from tests.models.gguf_writing import quantised, write_gguf
from tests.models.paged import Paged
from tests.models.ranks import Logits, logits_of, mixed_script
from tests.models.test_layouts import assert_near, assert_same

OPS, SCRIPT = open_ops("native", 1), mixed_script()
KEPT = {Kind.Q8_0: "q8", Kind.Q4_0: "q4", Kind.Q4_1: "q4m", Kind.Q4_K: "q4m"}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # that Q4_K divides
MIXTURES = ("qwen3-moe", "mixtral")
kinds = pytest.mark.parametrize("kind", list(KEPT), ids=lambda kind: kind.name)


def formats(model: Model) -> dict[str, set[str]]:
    """The formats of a model's packed weights, by what they are."""
    found: dict[str, set[str]] = {}

    def note(what: str, linear: Linear) -> None:
        found.setdefault(what, set()).add(linear.format)

    for layer in model.layers:
        note("qkv", layer.attention.qkv)
        note("out", layer.attention.out.weight)
        mlp: Any = layer.mlp
        for one in getattr(mlp, "experts", [mlp]):
            note("gate_up", one.gate_up)
            note("down", one.down.weight)
        if hasattr(mlp, "router"):
            note("router", mlp.router)
    note("head", model.head)
    if not model.spec.tied and not isinstance(model.table, Tensor):
        note("table", model.table)
    return found


def rounded(model: Any, kind: Kind, held: bool = False) -> Any:
    """The oracle with the numbers that a file of `kind` holds; or that products have of them where
    they are `held` in blocks: on tiles of AMX their bfloat16."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                numbers = gguf.dequantize(quantised(parameter.numpy(), kind), kind)
                exact = torch.from_numpy(numbers)
                parameter.copy_(exact.bfloat16() if held and OPS.level == "amx" else exact)
    return model


def sized(name: str) -> dict[str, Any]:
    more = {"moe_intermediate_size": 256} if "moe" in name else {}
    # llama.cpp's form of Qwen3-MoE has experts in every layer.
    return {**WIDE, **more, **({"mlp_only_layers": []} if name == "qwen3-moe" else {})}


@kinds
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3-tied"),
        *("qwen3-moe", "mixtral"),
    ],
)
def test_every_family_keeps_its_blocks_and_stays_near_its_numbers(
    name: str, kind: Kind, tmp_path: pathlib.Path
) -> None:
    oracle = build(name, **sized(name))
    path = write_gguf(oracle, tmp_path / "model.gguf", kind)
    model = load_model(path, ops=OPS)
    assert set().union(*formats(model).values()) == {KEPT[kind]}
    if not model.spec.tied:
        assert formats(model)["table"] == {KEPT[kind]}
    assert model.spec.dtype == torch.bfloat16
    tokens = prompt(30)
    exact = oracle_logits(rounded(oracle, kind, held=True), tokens)
    logits = Paged(model).step((0, tokens))[0]
    # Activations are rounded to bfloat16, and KV; Q4_K's factors to float16.
    assert_rows_near(logits, exact, 0.998, 0.06, name)
    if OPS.level == "amx" and kind is not Kind.Q4_K:  # whose factors are rounded before
        wide = Paged(load_model(path, ops=OPS, weights="bf16")).step((0, tokens))[0]
        assert torch.equal(logits, wide)
    else:
        twin = Paged(load_model(path, ops=ReferenceOps())).step((0, tokens))[0]
        near = 0.9995 if OPS.level == "amx" else 0.9998
        assert_rows_near(logits, twin, near, 0.03, name)


def assert_rows_near(got: Tensor, wanted: Tensor, cosine: float, most: float, name: str) -> None:
    """Cosine of each row at least, and difference at most `most` of the greatest logit; but for
    three rows in 30 of a mixture, which may take another expert where two are nearly equal."""
    found = torch.nn.functional.cosine_similarity(got, wanted)
    off = (got - wanted).abs().amax(-1)
    spared = 3 if name in MIXTURES else 0
    assert found.sort().values[spared] > cosine, found
    assert off.sort().values[len(off) - 1 - spared] < most * wanted.abs().max(), off


@kinds
def test_float32_is_asked_for_and_given(kind: Kind, tmp_path: pathlib.Path) -> None:
    oracle = build("llama", **WIDE)
    path = write_gguf(oracle, tmp_path / "model.gguf", kind)
    model = load_model(path, ops=OPS, dtype="float32")
    assert set().union(*formats(model).values()) == {"f32"}
    tokens = prompt(20)
    exact = oracle_logits(rounded(oracle, kind), tokens)
    assert (Paged(model).step((0, tokens))[0] - exact).abs().max() < 1e-3


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize(
    ("weights", "format", "head", "router"),
    [
        ("keep", "f32", "f32", "f32"),
        ("bf16", "bf16", "bf16", "bf16"),
        ("int8", "q8", "q8", "f32"),
        ("q4", "q4m", "q8", "f32"),
    ],
)
def test_a_checkpoint_of_numbers_is_converted(
    name: str, weights: Any, format: str, head: str, router: str
) -> None:
    folder, oracle = saved(name)
    model = load_model(folder, ops=OPS, weights=weights)
    found = formats(model)
    assert {what: found.pop(what) for what in ("head", "router", "table") if what in found} == {
        what: {value}
        for what, value in (("head", head), ("router", router), ("table", head))
        if (what != "router" or name in MIXTURES)
        and (what != "table" or (name != "llama-tied" and head.startswith("q")))
    }
    assert set().union(*found.values()) == {format}
    tokens = prompt(30)
    exact = oracle_logits(converted(oracle, weights), tokens)
    assert_rows_near(Paged(model).step((0, tokens))[0], exact, 0.998, 0.06, name)


def converted(oracle: Any, weights: str) -> Any:
    """A copy of the oracle with the numbers that the conversion leaves."""
    oracle = copy.deepcopy(oracle)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if (
                parameter.dim() < 2
                or weights in ("keep", "bf16")
                or name.endswith("mlp.gate.weight")
            ):
                continue
            outer = "embed_tokens" in name or "lm_head" in name
            to = "Q8_0" if weights == "int8" or outer else "Q4_1"
            flat = parameter.numpy().reshape(-1, parameter.shape[-1])
            blocks = (to_q8_0 if to == "Q8_0" else to_q4_1)(flat)
            numbers = torch.from_numpy(gguf.dequantize(blocks, Kind[to]))
            parameter.copy_(numbers.view(parameter.shape))
    return oracle


def test_int8_says_what_float32_says() -> None:
    for name in ("llama", "qwen2"):
        folder, oracle = saved(name)
        tokens = prompt(9)
        model = load_model(folder, ops=OPS, weights="int8", dtype="float32")
        assert model.spec.dtype == torch.float32, "of KV"
        assert Paged(model).greedy(tokens, 6) == oracle_greedy(oracle, tokens, 6)


def test_conversions_take_the_memory_they_promise() -> None:
    folder, _ = saved("llama")
    sizes = {
        weights: load_model(folder, ops=OPS, weights=weights).nbytes  # type: ignore[arg-type]
        for weights in CONVERSIONS
    }
    assert sizes["q4"] < sizes["int8"] < sizes["bf16"] < sizes["keep"]
    assert sizes["int8"] < 0.3 * sizes["keep"]


def test_what_the_file_has_in_blocks_is_made_no_larger(tmp_path: pathlib.Path) -> None:
    path = write_gguf(build("llama", **WIDE), tmp_path / "model.gguf", Kind.Q4_0)
    same = [
        Paged(load_model(path, ops=OPS, weights=weights)).step((0, prompt(12)))[0]
        for weights in ("keep", "int8", "q4")
    ]
    assert all(torch.equal(one, same[0]) for one in same)


def mixed(name: str) -> Kind:
    """Q4_K_M's way: some of q, k, v and of the rest are of more bits."""
    if "attn_v" in name:
        return Kind.Q8_0
    return Kind.F16 if "ffn_down" in name else Kind.Q4_1


def test_parts_of_one_weight_with_different_blocks_become_numbers(tmp_path: pathlib.Path) -> None:
    oracle = build("llama")
    path = write_gguf(oracle, tmp_path / "model.gguf", mixed)
    found = formats(load_model(path, ops=OPS))
    assert found == {
        "qkv": {"bf16"},
        "out": {"q4m"},
        "gate_up": {"q4m"},
        "down": {"bf16"},
        "head": {"q4m"},
        "table": {"q4m"},
    }
    assert formats(load_model(path, ops=OPS, weights="int8"))["qkv"] == {"q8"}


def test_a_wrong_word_names_the_right_ones(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"weights is 'q5': use one of keep, bf16, int8, q4"):
        load_model(tmp_path, ops=OPS, weights="q5")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dtype is 'half': use one of auto, bf16, float32"):
        load_model(tmp_path, ops=OPS, dtype="half")  # type: ignore[arg-type]


def test_a_number_that_is_not_finite_is_found_before_it_is_served(tmp_path: pathlib.Path) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 70] = torch.nan
    path = write_gguf(model, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight holds numbers"):
        load_model(path, ops=OPS, weights="q4")
    load_model(path, ops=OPS)


def test_the_bytes_of_a_file_are_counted_once_and_not_widened(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(build("llama-tied", **WIDE), tmp_path / "model.gguf", Kind.Q4_1)
    seen: list[tuple[int, int]] = []

    def refused(*arguments: object) -> None:
        raise AssertionError("a matrix was expanded")

    monkeypatch.setattr(type(OPS), "pack", refused)
    model = load_model(path, ops=OPS, progress=lambda done, total, _: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    total = seen[-1][1]
    assert seen[-1][0] == total < path.stat().st_size
    assert model.nbytes < 1.02 * total


# Layouts: weights in blocks have the bits of one rank, whatever the layout.

Load = Callable[[Layout, int], Model]


def loads(path: pathlib.Path, weights: Any) -> Load:
    return lambda layout, rank: load_model(path, ops=OPS, weights=weights, layout=layout, rank=rank)


def run(load: Load, layout: Layout) -> Logits:
    return logits_of(Grid(layout), functools.partial(load, layout), SCRIPT)


DENSE_LAYOUTS = (
    Layout(tp=2),
    Layout(tp=3),
    Layout(tp=12),
    Layout(pp=3, tp=4, dp=2),
    Layout(tp=6, cp=3, cp_split="zigzag"),
)
MOE_LAYOUTS = (
    Layout(tp=6, dp=2, ep=3, moe_dp=2),
    Layout(tp=12, cp=2, ep=4),
    Layout(pp=2, tp=4, ep=2, experts="all_to_all"),
)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "q4"])
@pytest.mark.parametrize("name", ["divisible", "divisible-moe"])
def test_converted_weights_have_the_bits_of_one_rank(name: str, weights: str) -> None:
    assert set(FAMILIES) >= {name}
    load = loads(saved(name)[0], weights)
    alone = run(load, Layout())
    found = formats(load(Layout(), 0))
    assert found["down"] == {"q8" if weights == "int8" else "q4m"}
    assert found["qkv"] == {"f32"}, "48 columns are no whole blocks, on any layout"
    for layout in DENSE_LAYOUTS if name == "divisible" else MOE_LAYOUTS:
        assert_same(run(load, layout), alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("kind", [*KEPT, mixed], ids=[*(kind.name for kind in KEPT), "mixed"])
def test_blocks_of_a_file_have_the_bits_of_one_rank(
    name: str, kind: Any, tmp_path: pathlib.Path
) -> None:
    load = loads(write_gguf(build(name, **sized(name)), tmp_path / "model.gguf", kind), "keep")
    alone = run(load, Layout())
    layouts = [Layout(tp=2), Layout(pp=3, tp=2, dp=2), Layout(tp=2, cp=2, cp_split="zigzag")]
    if name in MIXTURES:
        layouts = [
            Layout(tp=2, ep=2),
            Layout(tp=4, dp=2, ep=2, moe_dp=2),
            Layout(pp=2, tp=2, ep=2, dp=2, experts="all_to_all"),
        ]
    for layout in layouts:
        assert_same(run(load, layout), alone)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 3}, {"tp": 6, "dp": 2}, {"pp": 2, "tp": 3}], ids=str)
def test_fast_numerics_are_near_with_blocks_cut_by_tiles(
    axes: dict[str, int], tmp_path: pathlib.Path
) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32}
    oracle = build("llama", hidden_size=192, intermediate_size=512, **sizes)
    load = loads(write_gguf(oracle, tmp_path / "model.gguf", Kind.Q8_0), "keep")
    fast = Layout(**axes, numerics="fast")
    ranks = [load(fast, rank) for rank in range(fast.tp)]
    assert {one.format for rank in ranks for one in shares(rank)} == {"q8"}
    assert len({one.k for rank in ranks for one in shares(rank)}) > 1, "4 blocks are not cut evenly"
    alone = run(load, Layout())
    assert_near(run(load, fast), alone, 0.02 * max(x.abs().max().item() for x in alone.values()))


def shares(model: Model) -> list[Linear]:
    return [layer.mlp.down.weight for layer in model.layers]  # type: ignore[attr-defined]
