"""Ranks that die under a legible engine: requests pause and go on, and one cannot take all down."""

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from aserve.actors import supervisor
from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.actors.supervision import State
from aserve.core.noise import seed_of_choice
from aserve.core.request import SamplingParams
from aserve.errors import ModelError, RankDied, RequestError
from aserve.testing.legible import LegibleRunner, oracle

from .conftest import OpenEngine

PROMPT = tuple(range(20, 60))
POISON = 376  # no text here says it by itself


def params(seed: int = 1, max_tokens: int = 24) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


async def finish(engine: Engine, prompt: Sequence[int], chosen: SamplingParams) -> Completion:
    return await collect(engine.generate(prompt, chosen), tuple(prompt), chosen)


def said(engine: Engine, prompt: Sequence[int], chosen: SamplingParams) -> list[int]:
    assert chosen.seed is not None
    assert chosen.max_tokens is not None
    return oracle(prompt, seed_of_choice(chosen.seed, 0), engine.vocab_size, chosen.max_tokens)


async def finish_all(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    """Asked in this order, so that runs repeat."""
    asked = [engine.generate(prompt, params(seed=at)) for at, prompt in enumerate(prompts)]
    return [await collect(generation, (), params()) for generation in asked]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("fails_at", [1, 2, 7])
async def test_ranks_that_die_again_and_again_lose_nothing(
    open_legible: OpenEngine, fails_at: int, threaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [(*PROMPT[: 5 * at + 1], at) for at in range(6)]
    async with open_legible(
        faults=(fails_at, 9, -1), threaded=threaded, running_max=2, step_tokens=64
    ) as engine:
        done = await finish_all(engine, prompts)
        for at, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
            assert list(one.token_ids) == said(engine, prompt, params(seed=at))
            assert one.error is None
        statistics = engine.statistics()
        assert statistics.restarts >= 3
        assert statistics.state == State.SERVING
        assert statistics.planner.kv_pages_used == 0
        assert "told to fail" in (engine.last_break or "")
    assert "rank 0 died" in caplog.text


async def test_a_rank_that_dies_while_loading_is_told_to_whoever_opens(
    open_legible: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr("aserve.testing.legible.LegibleRunner.__init__", fail)
    with pytest.raises(MemoryError, match="no room"):
        async with open_legible():
            pytest.fail("it opened")


async def test_one_poisoned_request_fails_alone(open_legible: OpenEngine) -> None:
    """It kills the ranks whenever it is computed; the others wait their turn and are answered."""
    prompts: list[tuple[int, ...]] = [(*PROMPT[: 5 * at + 1], at) for at in range(6)]
    prompts[3] = (*PROMPT, POISON)
    with trio.fail_after(20):
        async with open_legible(faults=(-1, 0, POISON), running_max=4) as engine:
            done = await finish_all(engine, prompts)
            fates = [one.finish_reason for one in done]
            # Those that stood beside it in every step that broke cannot be told from it.
            assert fates[3] == "error"
            assert "the ranks broke 4 times computing this" in (done[3].error or "")
            assert fates.count("length") >= 2
            for at, one in enumerate(done):
                if one.finish_reason == "length":
                    assert list(one.token_ids) == said(engine, prompts[at], params(seed=at))
            assert engine.ready
            assert (await finish(engine, PROMPT, params())).finish_reason == "length"


async def test_who_gets_tokens_between_the_breaks_is_not_given_up(
    open_legible: OpenEngine,
) -> None:
    """A poisoned prompt of many chunks: whoever decodes beside it gets a token or more a start."""
    poisoned = (*(PROMPT * 4), POISON)
    with trio.fail_after(20):
        async with open_legible(faults=(-1, 0, POISON), step_tokens=16) as engine:
            kept, poison = await finish_all(engine, [PROMPT[:3], poisoned])
            assert (kept.finish_reason, poison.finish_reason) == ("length", "error")
            assert list(kept.token_ids) == said(engine, PROMPT[:3], params(seed=0))


async def test_ranks_beyond_help_fail_with_the_reason(open_legible: OpenEngine) -> None:
    with trio.fail_after(20):
        async with open_legible(faults=(0, 10**9, -1), restarts_max=2) as engine:
            done = await finish(engine, PROMPT, params())
            assert done.finish_reason == "error"  # a suspect, after three breaks
            done = await finish(engine, PROMPT, params())
            assert done.finish_reason == "error"
            assert "told to fail" in (engine.failure or "")
            assert engine.state is State.FAILED
            assert not engine.ready
            assert engine.statistics().restarts == 3
            with pytest.raises(RequestError) as caught:
                engine.generate(PROMPT, params())
            assert caught.value.status == 503


async def test_what_keeps_ranks_from_starting_again_is_told_as_it_is(
    open_legible: OpenEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that went away in between is for the operator to bring back, and no bug of ours."""
    async with open_legible(faults=(2, 1, -1)) as engine:

        def fail(*given: object) -> None:
            raise ModelError("the model has gone")

        monkeypatch.setattr(LegibleRunner, "__init__", fail)
        with trio.fail_after(5):
            done = await finish(engine, PROMPT, params())
        assert done.error == "the ranks cannot be started again: the model has gone"
        assert engine.failure == done.error
        assert engine.state is State.FAILED
    assert "the model has gone" in caplog.text
    assert "loop died" not in caplog.text


async def test_an_abort_while_ranks_are_started_anew_counts(open_legible: OpenEngine) -> None:
    async with open_legible(faults=(2, 1, -1), gated=True) as engine:
        ranks: Any = engine._supervisor._placement
        kept = engine.generate(PROMPT, params())
        gone = engine.generate(PROMPT[:9], params(seed=2))
        with trio.fail_after(5):
            await ranks.knocked.wait()
        assert engine.state is State.RESTARTING
        assert not engine.ready
        assert (await engine.debug_state()).silent == (0,)
        gone.abort()
        late = engine.generate(PROMPT[:7], params(seed=3))  # taken, and answered when they serve
        ranks.gate.set()
        assert list((await collect(kept, PROMPT, params())).token_ids) == said(
            engine, PROMPT, params()
        )
        assert [delta.finish_reason async for delta in gone][-1] == "abort"
        assert (await collect(late, PROMPT[:7], params(seed=3))).finish_reason == "length"
        assert engine.statistics().planner.kv_pages_used == 0


async def test_states_are_told_while_nothing_runs(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        await finish(engine, PROMPT, params())
        state = await engine.debug_state()
        [rank] = state.ranks
        assert rank.answered
        assert rank.step == rank.reported_step == engine.statistics().planner.steps - 1
        assert rank.doing.startswith("waiting for a plan")
        assert int(rank.digest, 16) == state.planner.digest
        assert state.silent == state.steps == ()


async def test_a_thread_that_never_ends_is_told_of(
    open_legible: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be ended; its requests and probes must not wait for it."""
    monkeypatch.setattr(supervisor, "ENDING_S", 0.01)
    async with stuck(open_legible, monkeypatch, plane_s=0.01) as (engine, begun, release):
        generation = engine.generate(PROMPT, params())
        await break_while_computing(engine, begun)
        with trio.fail_after(5):
            done = await collect(generation, (), params())
        assert done.error == "the ranks broke and could not be ended within 0.02 s"
        assert engine.state is State.FAILED
        release.set()


async def test_the_reason_of_a_break_is_told_while_ranks_are_still_being_ended(
    open_legible: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of the break before, and not none."""
    async with stuck(open_legible, monkeypatch) as (engine, begun, release):
        generation = engine.generate(PROMPT, params())
        await break_while_computing(engine, begun)
        with trio.fail_after(5):
            while engine.state is not State.RESTARTING:
                await trio.lowlevel.checkpoint()
        assert engine.last_break == "RankDied: rank 0 died: it was told so"
        release.set()
        generation.abort()


@asynccontextmanager
async def stuck(
    open_legible: OpenEngine, monkeypatch: pytest.MonkeyPatch, **ranks: float
) -> AsyncIterator[tuple[Engine, threading.Event, threading.Event]]:
    """An engine whose rank computes until the event is set, once `break_while_computing` saw it
    begin: a step that has not begun would be dropped, not waited for."""
    begun, release = threading.Event(), threading.Event()
    forward = LegibleRunner.forward

    def wait(self: LegibleRunner, work: Any, inward: None) -> Any:
        begun.set()
        release.wait(30)
        return forward(self, work, inward)

    monkeypatch.setattr(LegibleRunner, "forward", wait)
    try:
        async with open_legible(threaded=True, **ranks) as engine:
            yield engine, begun, release
    finally:
        release.set()


async def break_while_computing(engine: Engine, begun: threading.Event) -> None:
    with trio.fail_after(5):
        while not begun.is_set():
            await trio.lowlevel.checkpoint()
    ranks: Any = engine._supervisor.ranks
    ranks.plane.rank_died(0, "it was told so")


def test_the_error_of_a_rank_names_it() -> None:
    assert str(RankDied(3, "gone")) == "rank 3 died: gone"
