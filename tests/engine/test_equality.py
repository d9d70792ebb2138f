"""A seeded request says the same, to the last bit of its logprobs, whatever happens around it."""

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.core.request import SamplingParams, StructuredOutput

from .conftest import OpenEngine

TEXT = "Once upon a time the dog said that it would not mind, and the fox jumped over it. " * 4


def asked(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "logprobs": 2, "ignore_eos": True} | more)


REQUESTS: tuple[tuple[str, SamplingParams], ...] = (
    (TEXT[:20], asked(temperature=0)),
    (TEXT[:150], asked(temperature=0, prompt_logprobs=1)),
    (TEXT[:150], asked(seed=1, top_p=0.9)),
    (TEXT[:90], asked(seed=2, temperature=0.7, top_k=40, repetition_penalty=1.2)),
    (TEXT[:210], asked(seed=3, presence_penalty=0.5, frequency_penalty=0.3, min_p=0.01)),
    (TEXT[:210], asked(seed=4, logit_bias={300: 3.0, 301: -100.0}, bad_words=("the",))),
    (TEXT[:60], asked(seed=5, ignore_eos=False, min_tokens=12, logit_bias={2: 5.0})),
    (TEXT[:60], asked(seed=6, structured_outputs=StructuredOutput(regex="[a-z ]{40}"))),
    ("A", asked(seed=7, n=2)),
)


async def finish(engine: Engine, prompt: str, params: SamplingParams) -> Completion:
    generation = engine.generate(prompt, params)
    return await collect(generation, generation.prompt_token_ids, params)


async def finish_all(engine: Engine) -> list[Completion]:
    found: dict[int, Completion] = {}

    async def one(place: int) -> None:
        found[place] = await finish(engine, *REQUESTS[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(REQUESTS)):
            nursery.start_soon(one, place)
    return [found[place] for place in range(len(REQUESTS))]


def check_same(found: Sequence[Completion], alone: Sequence[Completion]) -> None:
    for one, other in zip(found, alone, strict=True):
        for choice, twin in zip(one.choices, other.choices, strict=True):
            assert choice.error is None
            assert choice.token_ids == twin.token_ids
            assert choice.text == twin.text
            assert choice.finish_reason == twin.finish_reason
            assert choice.logprobs == twin.logprobs
            assert choice.prompt_logprobs == twin.prompt_logprobs


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
