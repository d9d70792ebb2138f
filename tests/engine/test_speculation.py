"""With drafts a text is what it is without: every sampling, every layout, whatever happens."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import msgspec
import pytest
import trio
from torch import Tensor

from aserve.actors.completion import Completion
from aserve.core.message import Drafting
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.core.tree import NO_DRAFT, Draft
from aserve.errors import ConfigError
from aserve.models.regions import Region
from aserve.runner import drafting as methods
from aserve.runner.drafter import Drafter, Kept
from aserve.runner.runner import Runner, Work
from aserve.tensor.ops import KvLayer
from aserve.testing.drafts import draft

from .answers import LAYOUTS, REQUESTS, TEXT, asked, check_same, finish, finish_all, finish_each
from .conftest import OpenEngine, wait_answered

Key = tuple[tuple[int, ...], int]  # a prompt, and the seed of its answer
VOCAB_MAX = 64  # of decoys


class Guessing:
    """Drafters that know the texts which they have seen before, and hide them among decoys.

    What they propose goes by the text and the position alone, so that how much is accepted does not
    depend on a layout. It is a `DraftModel`, and each of its drafters too.
    """

    pages_beside = 0

    def __init__(self) -> None:
        self.texts: dict[Key, dict[int, int]] = {}
        self.drafts = 0
        self.is_silent = True

    def regions(self) -> tuple[Region, ...]:
        return ()

    def drafter(self, kv: Sequence[KvLayer]) -> Drafter:
        return self

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        return [self._draft(one, drafting) for one in kept]

    def _draft(self, one: Kept, drafting: Drafting) -> Draft:
        state = one.view.state
        prompt = tuple(state.tokens[: state.prompt_len])
        # Nobody said which seed a greedy request has.
        seed = state.sampling.seed if state.sampling.temperature else 0
        text = self.texts.setdefault((prompt, seed), {})
        start = one.view.start + 1
        text |= dict(enumerate(one.tokens, start))
        end = start + len(one.tokens)
        if self.is_silent or not (one.is_drawn and drafting.tokens):
            return NO_DRAFT
        right: list[int] = []
        while len(right) < drafting.depth and end + len(right) in text:
            right.append(text[end + len(right)])
        random = Random(f"{end} {seed}")
        self.drafts += 1
        if drafting.topk == 1:
            right = right[: random.randint(0, drafting.depth)]
            tokens = tuple(right + [3] * (drafting.tokens - len(right)))
            return Draft(tokens, tuple(range(-1, len(tokens) - 1)))
        return Draft(*draft(random, right, drafting, VOCAB_MAX))

    def drop(self, seq: int) -> None:
        pass


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Guessing:
    """In place of prompt lookup."""
    model = Guessing()
    monkeypatch.setattr(methods, "METHODS", {"ngram": lambda *given: model})
    return model


@pytest.fixture
async def alone(open_tiny: OpenEngine) -> list[Completion]:
    """Each request in one piece, by itself, nothing cached, nothing drafted."""
    async with open_tiny(schedule__prefix_cache=False, schedule__step_tokens=512) as engine:
        return [await finish(engine, prompt, params) for prompt, params in REQUESTS]


CHAIN: dict[str, Any] = {"spec__depth": 4, "spec__topk": 1}
TREE: dict[str, Any] = {"spec__depth": 5, "spec__topk": 3, "spec__tokens": 8}
SHAPES = {"chain": CHAIN, "tree": TREE}


def settings_of(shape: str, **more: Any) -> dict[str, Any]:
    asked = {"spec__method": "ngram", "spec__adaptive": False, "cache__page_size": 8}
    return asked | SHAPES[shape] | more


def target_steps(found: Sequence[Completion]) -> list[int]:
    return [one.usage.target_steps for one in found]


async def learn(open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion]) -> None:
    """With a drafter that says nothing yet."""
    async with open_tiny(**settings_of("chain")) as engine:
        found = await finish_all(engine)
        assert engine.statistics().planner.drafts.drafts == 0
    check_same(found, alone)
    assert target_steps(found) == target_steps(alone)
    guessing.is_silent = False


@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_change_no_text(
    open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion], shape: str
) -> None:
    await learn(open_tiny, guessing, alone)
    async with open_tiny(**settings_of(shape)) as engine:
        found = await finish_all(engine)
        drafts = engine.statistics().planner.drafts
        assert engine.statistics().planner.kv_pages_used == 0
    check_same(found, alone)
    assert drafts.drafts > 0
    assert drafts.accepted_lens[0] > 0
    assert len(drafts.accepted_lens) == SHAPES[shape]["spec__depth"] + 1, "whole drafts were right"
    steps, plain = target_steps(found), target_steps(alone)
    assert all(one < 0.8 * other for one, other in zip(steps, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_change_no_text_in_any_layout(
    open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion], shape: str
) -> None:
    """And as much of them is accepted as at one rank."""
    await learn(open_tiny, guessing, alone)
    async with open_tiny(**settings_of(shape)) as engine:
        expected = target_steps(await finish_all(engine))
    for layout in LAYOUTS.values():
        async with open_tiny(**settings_of(shape), **layout) as engine:
            found = await finish_all(engine)
            check_same(found, alone)
            assert target_steps(found) == expected, layout
            assert engine.statistics().restarts == 0
            assert engine.statistics().planner.kv_pages_used == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "settings",
    [
        {"schedule__step_tokens": 16},
        {"schedule__step_tokens": 37, "cache__page_size": 4},
        {"cache__page_size": 1},
        {"compute__threads": 2},
        {"compute__fused": False},
        {"schedule__running_max": 3},
        {"schedule__overlap": 0},
        {"schedule__overlap": 2},
        {"cache__kv_dtype": "int8"},
    ],
    ids=lambda settings: ", ".join(f"{key} {value}" for key, value in settings.items()),
)
async def test_drafts_change_no_text_in_any_batch(
    open_tiny: OpenEngine,
    guessing: Guessing,
    shape: str,
    settings: dict[str, Any],
) -> None:
    kept = {key: settings[key] for key in settings if key == "cache__kv_dtype"}
    async with open_tiny(**kept) as engine:
        alone = await finish_all(engine)
    async with open_tiny(**settings_of("chain"), **kept) as engine:
        await finish_all(engine)
    guessing.is_silent = False
    async with open_tiny(**settings_of(shape) | settings) as engine:
        check_same(await finish_all(engine), alone)
        assert engine.statistics().planner.drafts.accepted > 20


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("layout", ["", "tp 2", "dp 2"])
async def test_drafts_that_come_and_go_change_no_text(
    open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion], layout: str, overlap: int
) -> None:
    """Where less is drafted as soon as it takes too long: rows lag behind draws, or wait for a tree
    to be reported, as the clock will have it."""
    await learn(open_tiny, guessing, alone)
    settings = settings_of("tree", spec__adaptive=True, schedule__overlap=overlap)
    async with open_tiny(**settings, **LAYOUTS.get(layout, {})) as engine:
        for _ in range(2):
            check_same(await finish_all(engine), alone)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_change_no_text_on_cache_hits(
    open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion], shape: str
) -> None:
    await learn(open_tiny, guessing, alone)
    async with open_tiny(**settings_of(shape)) as engine:
        first = await finish_all(engine)
        again = await finish_all(engine)
        assert engine.statistics().planner.prefix_hit_tokens > 0
    check_same(first, alone)
    check_same(again, alone)
    assert target_steps(again) == target_steps(first)


# All start at once, and all grow.
CROWD = tuple(
    (TEXT[: 4 + seed], asked(seed=seed, temperature=0.8 * (seed % 3), max_tokens=140))
    for seed in range(10)
)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_change_no_text_after_retraction(
    open_tiny: OpenEngine, guessing: Guessing, shape: str
) -> None:
    async with open_tiny(**settings_of("chain")) as engine:
        alone = await finish_each(engine, CROWD)
    guessing.is_silent = False
    for layout in ("", "pp 2", "dp 2"):
        pool = {"cache__page_size": 4, "cache__kv_tokens": 260}
        settings = settings_of(shape, **pool) | LAYOUTS.get(layout, {})
        async with open_tiny(**settings) as engine:
            check_same(await finish_each(engine, CROWD), alone)
            statistics = engine.statistics().planner
        assert statistics.retractions > 0, layout
        assert statistics.drafts.accepted > 0, layout
        assert statistics.kv_pages_used == 0, layout


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
async def test_an_end_within_a_draft_is_the_end(
    open_tiny: OpenEngine, guessing: Guessing, alone: list[Completion], shape: str
) -> None:
    """A stop id, a stop string, the last token allowed: wherever in a draft they stand."""
    texts = [one.choices[0] for one in alone]
    ends: list[tuple[str, SamplingParams]] = []
    for (prompt, params), said in zip(REQUESTS, texts, strict=True):
        if params.structured_outputs is not None or params.n > 1 or params.min_tokens:
            continue
        token = said.token_ids[13]
        stop_at = said.text[len(said.text) // 2 :][:3]
        for change in (
            {"stop_token_ids": (token,)},
            {"stop": (stop_at,)},
            {"max_tokens": 7},
        ):
            ends.append((prompt, msgspec.structs.replace(params, logprobs=None, **change)))
    async with open_tiny() as engine:
        expected = await finish_each(engine, ends)
    async with open_tiny(**settings_of("chain")) as engine:
        check_same(await finish_each(engine, ends), expected)
    await learn(open_tiny, guessing, alone)
    async with open_tiny(**settings_of(shape)) as engine:
        found = await finish_each(engine, ends)
        await wait_answered(engine)
        assert engine.statistics().planner.drafts.accepted > 50
        assert engine.statistics().planner.kv_pages_used == 0
    check_same(found, expected)
    reasons = [one.choices[0].finish_reason for one in found]
    assert min(map(reasons.count, ("stop", "length"))) > 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "tp 2", "pp 2", "pp 2, dp 2"])
async def test_ranks_that_start_anew_draft_on(
    open_tiny: OpenEngine,
    guessing: Guessing,
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    await learn(open_tiny, guessing, alone)
    deaths = [3, 9]
    forward = Runner.forward

    def dying(self: Runner, work: Work, inward: Any) -> Any:
        if deaths and work.step == deaths[-1]:
            deaths.pop()
            raise ArithmeticError("told to die")
        return forward(self, work, inward)

    monkeypatch.setattr(Runner, "forward", dying)
    async with open_tiny(**settings_of("tree"), **LAYOUTS.get(layout, {})) as engine:
        with trio.fail_after(30):
            check_same(await finish_all(engine), alone)
        assert engine.statistics().restarts == 2
        assert engine.statistics().planner.drafts.accepted > 20


LOOKUP: dict[str, Any] = {"spec__method": "ngram", "spec__adaptive": False}
# A grammar makes even a tiny random model repeat itself.
SHE_SAID = StructuredOutput(regex="(she said that ){20}")
REPEATING = tuple(
    (TEXT[:length], SamplingParams(max_tokens=80, structured_outputs=SHE_SAID, **how))
    for length, how in ((40, {"temperature": 0}), (70, {"seed": 3}))
)


@pytest.mark.parametrize("topk", [1, 2])
async def test_prompt_lookup_foresees_what_repeats(open_tiny: OpenEngine, topk: int) -> None:
    found = []
    for settings in ({}, {**LOOKUP, "spec__topk": topk}):
        async with open_tiny(**settings) as engine:
            found.append(await finish_each(engine, REPEATING))
    check_same(found[1], found[0])
    steps, plain = map(target_steps, reversed(found))
    assert all(one < 0.6 * other for one, other in zip(steps, plain, strict=True)), (steps, plain)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
async def test_prompt_lookup_between_processes(open_tiny: OpenEngine, layout: str) -> None:
    async with open_tiny(**LOOKUP) as engine:
        here = await finish_each(engine, REPEATING)
    async with open_tiny(**LOOKUP, **LAYOUTS[layout], ranks__live="process") as engine:
        found = await finish_each(engine, REPEATING)
    check_same(found, here)
    assert target_steps(found) == target_steps(here)


async def test_a_shortest_run_longer_than_the_longest_is_refused(open_tiny: OpenEngine) -> None:
    settings = {"spec__method": "ngram", "spec__ngram_min": 4, "spec__ngram_max": 3}
    with pytest.raises(ConfigError, match="ngram_min is 4, more than"):
        async with open_tiny(**settings):
            pytest.fail("it opened")
