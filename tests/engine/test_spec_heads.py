"""Draft heads over the tiny model: the text is that without drafts, and as much of them is accepted
in every layout, in chunks and on cache hits, as at one rank in one piece."""

import pathlib
from typing import Any

import pytest

from aserve.models.eagle_spec import Method
from aserve.models.registry import load_spec

from .answers import TEXT, asked, check_same, finish_all, finish_each
from .conftest import OpenEngine, wait_answered
from .test_spec_smollm2 import untrained_head
from .test_speculation import CROWD, LAYOUTS, target_steps

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"spec__depth": 3, "spec__topk": 1},
    "tree": {"spec__depth": 3, "spec__topk": 6, "spec__tokens": 20},
}
GREEDY = [(TEXT[:length], asked(temperature=0)) for length in (20, 90, 150, 210)]


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def head(
    request: pytest.FixtureRequest,
    tiny_model_path: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    method: Method = request.param
    folder = tmp_path_factory.mktemp("heads") / method
    vocab = load_spec(tiny_model_path).vocab
    untrained_head(method, tiny_model_path, folder, vocab - vocab // 4)
    given = {"method": method, "path": str(folder), "adaptive": False}
    return {f"spec__{name}": value for name, value in given.items()}


@pytest.mark.parametrize("shape", SHAPES)
async def test_heads_foresee_as_much_in_every_layout_and_batch(
    open_tiny: OpenEngine, head: dict[str, Any], shape: str
) -> None:
    async with open_tiny() as engine:
        plain = await finish_all(engine)
    given = head | SHAPES[shape]
    async with open_tiny(**given) as engine:
        first = await finish_all(engine)
        drafts = engine.statistics().planner.drafts
    check_same(first, plain)
    assert drafts.drafts > 100
    assert shape == "chain" or drafts.accepted > 0
    for settings in (*LAYOUTS.values(), {"cache__page_size": 5}, {"compute__fused": False}):
        async with open_tiny(**given, **settings) as engine:
            for _ in range(2):  # then the cache has all prompts
                found = await finish_all(engine)
                check_same(found, plain)
                assert target_steps(found) == target_steps(first), settings
            assert engine.statistics().restarts == 0


@pytest.mark.parametrize("shape", SHAPES)
async def test_heads_see_all_of_a_prompt_however_it_is_cut(
    open_tiny: OpenEngine, head: dict[str, Any], shape: str
) -> None:
    """Chunks of one sequence, alone: nothing else takes rows of its drafts."""
    given = head | SHAPES[shape] | {"cache__page_size": 8, "schedule__running_max": 1}
    steps: list[list[int]] = []
    for step_tokens in (512, 32, 24):
        async with open_tiny(**given, schedule__step_tokens=step_tokens) as engine:
            found = []
            for one in GREEDY:
                found += await finish_each(engine, [one])
            steps.append(target_steps(found))
    assert steps[1] == steps[2] == steps[0]


@pytest.mark.parametrize("layout", ["", "pp 2", "dp 2"])
async def test_heads_draft_for_who_was_retracted(
    open_tiny: OpenEngine, head: dict[str, Any], layout: str
) -> None:
    async with open_tiny() as engine:
        plain = await finish_each(engine, CROWD)
    small = {"cache__page_size": 4, "cache__kv_tokens": 260}
    settings = head | SHAPES["tree"] | small | LAYOUTS.get(layout, {})
    async with open_tiny(**settings) as engine:
        found = await finish_each(engine, CROWD)
        await wait_answered(engine)
        statistics = engine.statistics().planner
    check_same(found, plain)
    assert statistics.retractions > 0
    assert statistics.kv_pages_used == 0
