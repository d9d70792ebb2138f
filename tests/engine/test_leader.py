"""The engine's own logic over a legible model: text, ends, aborts, deaths, bounds."""

import gc
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.core.noise import seed_of_choice
from aserve.core.request import SamplingParams
from aserve.errors import RequestError
from aserve.testing.legible import oracle

from .answers import finish_each
from .conftest import OpenEngine

PROMPT = tuple(range(20, 60))


def params(seed: int = 1, max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


async def finish(engine: Engine, prompt: Sequence[int], chosen: SamplingParams) -> Completion:
    generation = engine.generate(prompt, chosen)
    return await collect(generation, generation.prompt_token_ids, chosen)


def said(
    engine: Engine, prompt: Sequence[int], chosen: SamplingParams, choice: int = 0
) -> list[int]:
    assert chosen.seed is not None
    assert chosen.max_tokens is not None
    seed = seed_of_choice(chosen.seed, choice)
    return oracle(prompt, seed, engine.vocab_size, chosen.max_tokens)


def pages_held(engine: Engine) -> int:
    return engine.statistics().planner.kv_pages_used


async def test_tokens_are_the_oracles_and_text_is_their_decoding(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        done = await finish(engine, PROMPT, params())
        assert list(done.token_ids) == said(engine, PROMPT, params())
        assert done.text == engine.tokenizer.decode(list(done.token_ids), skip_special=True)
        assert done.finish_reason == "length"
        assert done.usage.prompt_tokens == len(PROMPT)
        assert done.usage.completion_tokens == 24


async def test_a_hundred_at_once_under_a_tiny_pool_say_what_each_says_alone(
    open_legible: OpenEngine,
) -> None:
    async with open_legible(pages=48, step_tokens=32, running_max=16, threaded=True) as engine:
        asked = [
            ((*PROMPT[: number % 30 + 1], number), params(seed=number)) for number in range(100)
        ]
        done = await finish_each(engine, asked)
        for (prompt, chosen), one in zip(asked, done, strict=True):
            assert list(one.token_ids) == said(engine, prompt, chosen)
        assert engine.statistics().planner.retractions > 0
        assert pages_held(engine) == 0


async def test_each_choice_of_n_has_its_own_seed(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        chosen = params(n=3)
        done = await finish(engine, PROMPT, chosen)
        for choice in range(3):
            assert list(done.choices[choice].token_ids) == said(engine, PROMPT, chosen, choice)
        assert done.usage.completion_tokens == 72
        assert len({choice.token_ids for choice in done.choices}) == 3


async def test_a_stop_string_ends_the_text_before_it(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        whole = (await finish(engine, PROMPT, params())).text
        stop = whole[5:9]
        cut = await finish(engine, PROMPT, params(stop=stop))
        assert cut.text == whole[: whole.index(stop)]
        assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
        kept = await finish(engine, PROMPT, params(stop=(stop,), include_stop_str_in_output=True))
        assert kept.text == whole[: whole.index(stop)] + stop
        assert cut.token_ids == kept.token_ids
        assert cut.usage.completion_tokens == len(cut.token_ids) < 24


async def test_a_stop_string_is_not_looked_for_in_the_first_min_tokens(
    open_legible: OpenEngine,
) -> None:
    async with open_legible() as engine:
        done = await finish(engine, PROMPT, params())
        first = engine.tokenizer.decode(list(done.token_ids[:1]), skip_special=True)
        assert first
        held = await finish(engine, PROMPT, params(stop=first, min_tokens=20))
        assert len(held.token_ids) >= 20
        assert done.text.startswith(held.text)
        # The token that reaches min_tokens is one of them.
        assert len((await finish(engine, PROMPT, params(stop=first, min_tokens=1))).token_ids) > 1


async def test_a_stop_token_ends_the_text_and_is_not_shown(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        tokens = said(engine, PROMPT, params())
        stop = tokens[6]
        place = tokens.index(stop)
        done = await finish(engine, PROMPT, params(stop_token_ids=(stop,)))
        assert list(done.token_ids) == tokens[: place + 1]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.text == engine.tokenizer.decode(tokens[:place], skip_special=True)


@pytest.mark.parametrize("read", [0, 1, 5])
async def test_abort_ends_the_stream_and_frees_pages_within_a_step(
    open_legible: OpenEngine, read: int
) -> None:
    async with open_legible() as engine:
        generation = engine.generate(PROMPT, params(max_tokens=200), request_id="it")
        for _ in range(read):
            await generation.__anext__()
        steps = engine.statistics().planner.steps
        assert engine.abort("it")
        assert not engine.abort("it")
        rest = [delta async for delta in generation]
        assert rest[-1].finish_reason == "abort"
        await trio.testing.wait_all_tasks_blocked()
        assert pages_held(engine) == 0
        assert engine.statistics().planner.steps <= steps + 1
        assert engine.statistics().finished == {"abort": 1}


async def test_leaving_the_loop_early_frees_the_pages(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        async for delta in engine.generate(PROMPT, params(max_tokens=200)):
            if delta.token_ids:
                break
        del delta
        gc.collect()
        await trio.testing.wait_all_tasks_blocked()
        statistics = engine.statistics()
        assert statistics.planner.kv_pages_used == 0
        assert statistics.planner.steps < 10


async def test_a_consumer_that_sleeps_gets_everything_in_one_piece(
    open_legible: OpenEngine,
) -> None:
    async with open_legible() as engine:
        generation = engine.generate(PROMPT, params())
        await trio.testing.wait_all_tasks_blocked()
        deltas = [delta async for delta in generation]
        assert len(deltas) == 1
        assert list(deltas[0].token_ids) == said(engine, PROMPT, params())


async def test_a_full_queue_refuses_all_choices_of_a_request(open_legible: OpenEngine) -> None:
    async with open_legible(waiting_max=4, running_max=1) as engine:
        kept = [engine.generate(PROMPT, params(seed=seed)) for seed in range(3)]
        with pytest.raises(RequestError) as caught:
            engine.generate(PROMPT, params(n=2))
        assert caught.value.status == 429
        assert caught.value.retry_after_s
        assert engine.statistics().planner.waiting == 3
        for seed, generation in enumerate(kept):
            done = await collect(generation, PROMPT, params())
            assert list(done.token_ids) == said(engine, PROMPT, params(seed=seed))


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_dying_rank_ends_every_request_with_an_error_and_no_hang(
    open_legible: OpenEngine, threaded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with trio.fail_after(5):
        async with open_legible(
            faults=(3, 9, -1), threaded=threaded, running_max=1, restarts_max=0
        ) as engine:
            generations = [engine.generate(PROMPT, params(seed=seed)) for seed in range(3)]
            for generation in generations:
                deltas = [delta async for delta in generation]
                assert deltas[-1].finish_reason == "error"
                assert "rank 0 died" in (deltas[-1].error or "")
            assert not engine.ready
            assert "told to fail" in (engine.failure or "")
            with pytest.raises(RequestError) as caught:
                engine.generate(PROMPT, params())
            assert caught.value.status == 503
    assert "rank 0 died" in caplog.text


async def test_an_error_of_the_users_block_leaves_as_it_is(open_legible: OpenEngine) -> None:
    async def block() -> None:
        async with open_legible(threaded=True) as engine:
            engine.generate(PROMPT, params(max_tokens=200))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await block()


async def test_closing_in_the_middle_ends_streams_with_abort(open_legible: OpenEngine) -> None:
    async with open_legible(threaded=True) as engine:
        generation = engine.generate(PROMPT, params(max_tokens=200))
        await generation.__anext__()
    deltas = [delta async for delta in generation]
    assert deltas[-1].finish_reason == "abort"
    with pytest.raises(RequestError) as caught:
        engine.generate(PROMPT)
    assert caught.value.status == 503


async def test_cancelling_around_the_engine_ends_it(open_legible: OpenEngine) -> None:
    with trio.move_on_after(5) as scope:
        async with open_legible(threaded=True) as engine:
            generation = engine.generate(PROMPT, params(max_tokens=200))
            await generation.__anext__()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_draining_lets_requests_end_and_takes_no_more(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        generation = engine.generate(PROMPT, params())
        await engine.drain(limit_s=5)
        with pytest.raises(RequestError) as caught:
            engine.generate(PROMPT)
        assert caught.value.status == 503
        assert not engine.ready
        done = await collect(generation, PROMPT, params())
        assert done.finish_reason == "length"


async def test_draining_aborts_what_outlasts_the_limit(open_legible: OpenEngine) -> None:
    async with open_legible(running_max=1) as engine:
        generation = engine.generate(PROMPT, params(max_tokens=200))
        await engine.drain(limit_s=0)
        deltas = [delta async for delta in generation]
        assert deltas[-1].finish_reason == "abort"


async def test_an_idle_engine_takes_no_steps(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        await finish(engine, PROMPT, params())
        steps = engine.statistics().planner.steps
        await trio.testing.wait_all_tasks_blocked()
        assert engine.statistics().planner.steps == steps


async def test_statistics_count_what_happened(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        await finish(engine, PROMPT, params())
        again = await finish(engine, PROMPT, params(seed=2))
        statistics = engine.statistics()
        assert statistics.requests == 2
        assert statistics.finished == {"length": 2}
        assert statistics.prompt_tokens == 2 * len(PROMPT)
        assert statistics.generation_tokens == 48
        assert statistics.cached_tokens == again.usage.cached_tokens > 0
        assert statistics.ttft_s.count == 2
        assert statistics.e2e_s.count == 2
        assert statistics.inter_token_s.count == 46
        assert statistics.step_s.count == statistics.planner.steps


async def test_a_salt_keeps_prefixes_apart(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        for salt, hits in (("a", False), ("b", False), ("a", True)):
            generation = engine.generate(PROMPT, params(), cache_salt=salt)
            done = await collect(generation, PROMPT, params())
            assert (done.usage.cached_tokens > 0) is hits
        assert engine.flush_cache()
        assert engine.statistics().planner.kv_pages_cached == 0


async def test_a_request_id_may_be_used_again_only_when_its_request_is_over(
    open_legible: OpenEngine,
) -> None:
    async with open_legible() as engine:
        generation = engine.generate(PROMPT, params(), request_id="it")
        with pytest.raises(RequestError) as caught:
            engine.generate(PROMPT, params(), request_id="it")
        assert caught.value.param == "request_id"
        await collect(generation, PROMPT, params())
        await collect(engine.generate(PROMPT, params(), request_id="it"), PROMPT, params())


async def test_echo_puts_the_prompt_first(open_legible: OpenEngine) -> None:
    async with open_legible() as engine:
        plain = await finish(engine, PROMPT, params())
        echoed = await finish(engine, PROMPT, params(echo=True, n=2))
        head = engine.tokenizer.decode(list(PROMPT), skip_special=True)
        assert echoed.text == head + plain.text
        assert echoed.choices[1].text.startswith(head)
        assert echoed.token_ids == plain.token_ids
