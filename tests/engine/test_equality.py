"""A seeded request says the same, to the last bit of its logprobs, whatever happens around it."""

from typing import Any

import pytest

from aserve.actors.completion import Completion
from aserve.core.request import SamplingParams

from .answers import REQUESTS, TEXT, check_same, finish, finish_all
from .conftest import OpenEngine


@pytest.fixture
async def alone(open_tiny: OpenEngine) -> list[Completion]:
    """Each request in one piece, by itself, nothing cached."""
    async with open_tiny(schedule__prefix_cache=False, schedule__step_tokens=512) as engine:
        return [await finish(engine, prompt, params) for prompt, params in REQUESTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule__step_tokens": 16},
        {"schedule__step_tokens": 37, "cache__page_size": 4},
        {"compute__threads": 2},
        {"schedule__running_max": 3},
    ],
    ids=["batch", "chunks", "small pages", "two threads", "three at once"],
)
async def test_in_any_batch(
    open_tiny: OpenEngine, alone: list[Completion], settings: dict[str, Any]
) -> None:
    async with open_tiny(**settings) as engine:
        check_same(await finish_all(engine), alone)


@pytest.mark.slow
async def test_on_cache_hits(open_tiny: OpenEngine, alone: list[Completion]) -> None:
    async with open_tiny(cache__page_size=4) as engine:
        for _ in range(2):
            check_same(await finish_all(engine), alone)
        assert engine.statistics().planner.prefix_hit_tokens > 0
        hit = await finish(engine, *REQUESTS[4])
        check_same([hit], [alone[4]])
        assert hit.usage.cached_tokens >= hit.usage.prompt_tokens - 4


@pytest.mark.slow
async def test_after_retraction(open_tiny: OpenEngine, alone: list[Completion]) -> None:
    retractions = 0
    for tokens in (160, 180, 200, 220):
        pages = {"cache__page_size": 4, "cache__kv_tokens": tokens, "schedule__step_tokens": 64}
        async with open_tiny(**pages) as engine:
            check_same(await finish_all(engine), alone)
            retractions += engine.statistics().planner.retractions
    assert retractions > 0


@pytest.mark.slow
async def test_with_the_reference_kernels_the_same_holds(open_tiny: OpenEngine) -> None:
    """Their bits differ from the native ones, and may from batch to batch: greedy text only."""
    greedy = SamplingParams(temperature=0, max_tokens=12)
    reference = {"compute__kernels": "reference", "model__dtype": "float32"}
    native = {"model__dtype": "float32"}
    texts = []
    for settings in (reference, native):
        async with open_tiny(**settings) as engine:
            texts.append((await finish(engine, TEXT[:40], greedy)).text)
    assert texts[0] == texts[1]
