"""Requests of every kind of sampling, and what it means that two engines answer them alike."""

from collections.abc import Sequence
from typing import Any

import trio

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.actors.prompt import Prompt
from aserve.core.request import SamplingParams, StructuredOutput

TEXT = "Once upon a time the dog said that it would not mind, and the fox jumped over it. " * 4

# Of the tiny model, which has two KV heads.
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": {"layout__tp": 2},
    "pp 2": {"layout__pp": 2},
    "pp 2, overlap": {"layout__pp": 2, "schedule__overlap": 1},
    "dp 2": {"layout__tp": 2, "layout__dp": 2},
    "cp 2": {"layout__tp": 2, "layout__cp": 2},
    "cp 2 zigzag": {"layout__tp": 2, "layout__cp": 2, "layout__cp_split": "zigzag"},
    "pp 2, tp 2": {"layout__pp": 2, "layout__tp": 2},
    "pp 2, dp 2": {"layout__pp": 2, "layout__tp": 2, "layout__dp": 2},
}


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


async def finish_each(
    engine: Engine, asked: Sequence[tuple[Prompt, SamplingParams]]
) -> list[Completion]:
    """All at once and in this order, before a step is planned: so it is the planner alone, and no
    clock, that says who computes beside whom and who must go.
    """
    generations = [engine.generate(prompt, params) for prompt, params in asked]
    found: dict[int, Completion] = {}

    async def one(place: int) -> None:
        generation = generations[place]
        found[place] = await collect(generation, generation.prompt_token_ids, asked[place][1])

    async with trio.open_nursery() as nursery:
        for place in range(len(asked)):
            nursery.start_soon(one, place)
    return [found[place] for place in range(len(asked))]


async def finish_all(engine: Engine) -> list[Completion]:
    return await finish_each(engine, REQUESTS)


def check_same(found: Sequence[Completion], alone: Sequence[Completion]) -> None:
    for one, other in zip(found, alone, strict=True):
        for choice, twin in zip(one.choices, other.choices, strict=True):
            assert choice.error is None
            assert choice.token_ids == twin.token_ids
            assert choice.text == twin.text
            assert choice.finish_reason == twin.finish_reason
            assert choice.logprobs == twin.logprobs
            assert choice.prompt_logprobs == twin.prompt_logprobs
