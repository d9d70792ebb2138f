"""SmolLM2 says the same with drafts of every kind, in every layout, however it is sampled."""

import pathlib
from typing import Any, cast

import pytest
import torch
import trio

from aserve.actors.completion import Completion
from aserve.actors.engine import open_engine
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.models.eagle_spec import Method
from aserve.models.registry import open_checkpoint, spec_of
from aserve.models.weights.loader import TABLE
from aserve.training.card import head_config, save_head, spec_for
from aserve.training.start import Ends, first_weights, last_layer

from .answers import check_same, finish_each
from .conftest import wait_answered

pytestmark = pytest.mark.slow

DRAFT_VOCAB = 8192  # the first tokens of a byte-pair vocabulary are the frequent ones
N_TOKENS = 20
NOTE = (
    "The city council met on Monday to discuss the new bridge over the river. The mayor said that "
    "the bridge would cost twelve million dollars and take two years to build. "
)
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    NOTE + NOTE[:90],
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.8, "seed": 7, "structured_outputs": StructuredOutput(regex="([a-z]+ ){40}")},
)
ASKED = [
    (prompt, SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, logprobs=1, **sampling))
    for prompt in PROMPTS
    for sampling in SAMPLINGS
]
CHAIN = {"spec__depth": 3, "spec__topk": 1}
TREE = {"spec__depth": 3, "spec__topk": 3, "spec__tokens": 8}
METHODS = ("ngram", "draft", "eagle", "eagle3")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 3": {"layout__tp": 3},
    "pp 2": {"layout__pp": 2},
    "pp 2 x tp 3": {"layout__pp": 2, "layout__tp": 3},
    "dp 3": {"layout__tp": 3, "layout__dp": 3},
    "cp 3": {"layout__tp": 3, "layout__cp": 3},
}


def untrained_head(
    method: Method, model: pathlib.Path, folder: pathlib.Path, draft_vocab: int = DRAFT_VOCAB
) -> pathlib.Path:
    """The head that training begins with: it foresees little, and real text takes it."""
    with open_checkpoint(model) as (config, source):
        target = spec_of(config, source, torch.bfloat16)
        norm_H = source.read("model.norm.weight", (slice(0, target.hidden),), torch.float32)
        shape = (slice(0, draft_vocab), slice(0, target.hidden))
        ends = Ends(norm_H, source.read(TABLE, shape, torch.float32), last_layer(source, target))
        n_drafted = target.vocab if method == "eagle" else draft_vocab
        made = head_config(target, method, n_drafted, target.inner)
        spec = spec_for(made, target, method)
        weights = first_weights(spec, ends, torch.Generator().manual_seed(0))
    folder.mkdir(parents=True)
    save_head(folder, made, weights, None if method == "eagle" else torch.arange(draft_vocab))
    return folder


@pytest.fixture(scope="module")
def drafters(
    smollm2_path: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Settings of each method, all of its drafts being asked for."""
    folder = tmp_path_factory.mktemp("heads")
    paths: dict[str, pathlib.Path] = {"draft": smollm2_path}
    for method in ("eagle", "eagle3"):
        paths[method] = untrained_head(cast(Method, method), smollm2_path, folder / method)
    return {
        method: {"spec__method": method, "spec__adaptive": False}
        | ({"spec__path": str(paths[method])} if method in paths else {})
        for method in METHODS
    }


async def said(
    path: pathlib.Path, settings: dict[str, Any], rounds: int = 1
) -> tuple[list[list[Completion]], Any]:
    """The answers of each round, and the planner's statistics behind the last."""
    given = {"cache__kv_tokens": 8192, "ranks__live": "thread", "compute__threads": 1} | settings
    async with open_engine(path, **given) as engine:
        found = [await finish_each(engine, ASKED) for _ in range(rounds)]
        await wait_answered(engine)
        assert engine.statistics().restarts == 0
        statistics = engine.statistics().planner
    assert statistics.kv_pages_used == 0
    return found, statistics


def steps_of(found: list[Completion]) -> list[int]:
    return [one.usage.target_steps for one in found]


@pytest.fixture(scope="module")
def plain(smollm2_path: pathlib.Path) -> list[Completion]:
    ((found,), _) = trio.run(said, smollm2_path, {})
    assert {len(one.token_ids) for one in found} == {N_TOKENS}
    return cast(list[Completion], found)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("method", METHODS)
async def test_drafts_change_nothing_but_the_steps(
    method: str,
    shape: dict[str, Any],
    smollm2_path: pathlib.Path,
    drafters: dict[str, dict[str, Any]],
    plain: list[Completion],
) -> None:
    """Also of prompts in chunks, and on a hit of the cache."""
    settings = drafters[method] | shape
    (first, again), statistics = await said(smollm2_path, settings, rounds=2)
    for found in (first, again):
        check_same(found, plain)
    assert statistics.prefix_hit_tokens > 0
    assert statistics.drafts.drafts > 0
    if method != "eagle":  # which foresees next to nothing before it was trained
        assert sum(steps_of(first)) < sum(steps_of(plain))
    if method != "ngram":  # which looks no further than its own text either way
        assert steps_of(again) == steps_of(first)
    chunks = {"schedule__step_tokens": 48, "cache__page_size": 4}
    ((found,), _) = await said(smollm2_path, settings | chunks)
    check_same(found, plain)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
async def test_every_layout_accepts_what_one_rank_accepts(
    method: str,
    name: str,
    smollm2_path: pathlib.Path,
    drafters: dict[str, dict[str, Any]],
    plain: list[Completion],
) -> None:
    settings = drafters[method] | TREE
    ((alone,), _) = await said(smollm2_path, settings)
    ((found,), statistics) = await said(smollm2_path, settings | LAYOUTS[name])
    check_same(found, plain)
    assert steps_of(found) == steps_of(alone)
    assert statistics.drafts.drafts > 0
