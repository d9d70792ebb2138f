"""Every family against transformers: logits and greedy tokens, however the rows are cut."""

import pathlib

import pytest
import torch

from aserve.models.registry import Model, load_model
from aserve.tensor.ops import Ops, open_ops
from tests.models.families import (
    DENSE,
    FAMILIES,
    build,
    oracle_greedy,
    oracle_logits,
    prompt,
    saved,
)
from tests.models.paged import Paged

TOLERANCE = 1e-4
KERNELS = ("reference", "native")


@pytest.fixture(scope="module", params=KERNELS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_ops(request.param, 1)


def load(name: str, ops: Ops) -> Model:
    return load_model(saved(name)[0], ops=ops)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == wanted.shape
    worst = (got - wanted).abs().max()
    assert worst <= tolerance, f"off by {worst}"


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_whole_prompt_are_those_of_transformers(name: str, ops: Ops) -> None:
    tokens = prompt(75)
    logits = Paged(load(name, ops)).step((0, tokens))[0]
    wanted = oracle_logits(saved(name)[1], tokens)
    assert wanted.std() > 0.5, "an oracle with flat logits proves nothing"
    assert_close(logits, wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(name: str, ops: Ops) -> None:
    tokens = prompt(11, seed=1)
    wanted = oracle_greedy(saved(name)[1], tokens, 12)
    assert Paged(load(name, ops)).greedy(tokens, 12) == wanted


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("chunk_len", [1, 5, 32])
def test_a_prompt_in_chunks_gives_the_logits_of_one_piece(
    name: str, chunk_len: int, ops: Ops
) -> None:
    tokens = prompt(70)
    paged = Paged(load(name, ops))
    chunks = [tokens[at : at + chunk_len] for at in range(0, len(tokens), chunk_len)]
    logits = torch.cat([paged.step((0, chunk))[0] for chunk in chunks])
    assert_close(logits, oracle_logits(saved(name)[1], tokens))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3-moe", "mixtral"])
def test_sequences_in_one_step_do_not_see_each_other(name: str, ops: Ops) -> None:
    first, second, third = prompt(33, 1), prompt(18, 2), prompt(9, 3)
    paged = Paged(load(name, ops))
    before = paged.step((0, first[:20]), (1, second[:17]))
    after = paged.step((1, second[17:]), (2, third), (0, first[20:]))
    oracle = saved(name)[1]
    assert_close(torch.cat((before[0], after[2])), oracle_logits(oracle, first))
    assert_close(torch.cat((before[1], after[0])), oracle_logits(oracle, second))
    assert_close(after[1], oracle_logits(oracle, third))


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_row_has_the_same_bits_in_any_batch_chunk_and_page(name: str, dtype: str) -> None:
    folder, _ = saved(name)
    model = load_model(folder, ops=open_ops("native", 1), dtype=dtype)  # type: ignore[arg-type]
    threaded = load_model(folder, ops=open_ops("native", 2), dtype=dtype)  # type: ignore[arg-type]
    tokens, other = prompt(40, 1), prompt(30, 2)
    whole = Paged(model).step((0, tokens))[0]
    paged = Paged(threaded, seed=7)
    parts = [paged.step((1, other[:9]), (0, tokens[:13]))[1]]
    parts += [paged.step((0, tokens[at : at + 1]))[0] for at in range(13, 20)]
    parts += [paged.step((0, tokens[20:]), (1, other[9:]), (2, other))[0]]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3-moe", "mixtral"])
def test_bfloat16_stays_near_transformers_in_bfloat16(
    name: str, ops: Ops, tmp_path: pathlib.Path
) -> None:
    oracle = build(name, torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, ops=ops)
    assert model.spec.dtype == torch.bfloat16
    tokens = prompt(40)
    logits = Paged(model).step((0, tokens))[0]
    exact = oracle_logits(oracle.float(), tokens)
    agreement_R = torch.nn.functional.cosine_similarity(logits, exact)
    # One expert chosen otherwise, where two are nearly as good, moves a whole row.
    worst = agreement_R.min() if name in DENSE else agreement_R.median()
    assert worst > 0.998, worst


def test_two_stages_in_a_row_are_the_whole_model(ops: Ops) -> None:
    from aserve.core.config import Layout

    layout = Layout(pp=2)
    folder, _ = saved("llama-tied")
    whole = Paged(load_model(folder, ops=ops))
    stages = [load_model(folder, ops=ops, layout=layout, rank=rank) for rank in range(2)]
    assert [list(stage.stage) for stage in stages] == [[0], [1, 2]]
    assert [region.layers for stage in stages for region in stage.regions()] == [(0,), (1, 2)]
    first, second = (Paged(stage) for stage in stages)
    row = (0, prompt(20))
    with torch.inference_mode():
        hidden = second.forward(row, hidden=first.forward(row))
        logits = stages[1].logits(hidden, (20,), second.seat)
    assert torch.equal(logits, whole.step(row)[0])


def test_a_tied_table_is_in_memory_once() -> None:
    folder, oracle = saved("llama-tied")
    model = load_model(folder, ops=open_ops("native", 1), dtype="bf16")
    matrices = sum(p.numel() * 2 for p in oracle.parameters() if p.dim() == 2)
    assert matrices <= model.nbytes <= matrices * 1.2


def test_regions_say_what_a_token_costs() -> None:
    (region,) = load_model(saved("qwen3")[0], ops=open_ops("reference", 1)).regions()
    assert (region.name, region.per, region.layers) == ("kv", "token", (0, 1, 2))
    assert (region.heads, region.head_dim, region.dtype) == (2, 32, torch.float32)
    assert region.item_bytes == 2 * 2 * 32 * 4


def test_a_rotary_table_grows_without_changing() -> None:
    model = load_model(saved("llama-rope-yarn")[0], ops=open_ops("reference", 1))
    assert model.rotary.table.cos_sin_PR.numel() == 0, "made when first needed"
    short = model.rotary.upto(5).cos_sin_PR
    assert model.rotary.upto(len(short)).cos_sin_PR is short
    long = model.rotary.upto(3 * len(short) + 1).cos_sin_PR
    assert len(long) == 3 * len(short) + 1
    assert torch.equal(long[: len(short)], short)
