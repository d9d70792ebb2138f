"""The tiny model in every layout says what one rank says: inline, in threads, in processes."""

import threading
from typing import Any

import pytest
import trio

from aserve.actors.completion import Completion, collect
from aserve.actors.supervision import State
from aserve.errors import AserveError
from aserve.runner.runner import Runner, Work

from .answers import LAYOUTS, REQUESTS, check_same, finish_all
from .conftest import OpenEngine, wait_answered

SETTINGS = {"schedule__step_tokens": 48, "cache__page_size": 8}


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    return []


@pytest.mark.slow
@pytest.mark.parametrize("live", ["inline", "thread"])
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_ranks_in_one_process(
    open_tiny: OpenEngine, alone: list[Completion], layout: str, live: str
) -> None:
    await compare(open_tiny, alone, {**LAYOUTS[layout], "ranks__live": live})


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "dp 2", "cp 2"])
async def test_ranks_in_processes(
    open_tiny: OpenEngine, alone: list[Completion], layout: str
) -> None:
    await compare(open_tiny, alone, {**LAYOUTS[layout], "ranks__live": "process"})


@pytest.mark.slow
async def test_sums_over_torch_distributed(open_tiny: OpenEngine, alone: list[Completion]) -> None:
    settings = {**LAYOUTS["tp 2"], "ranks__live": "process", "ranks__layer_plane": "torch"}
    await compare(open_tiny, alone, settings)


@pytest.mark.slow
async def test_one_rank_in_a_process(open_tiny: OpenEngine, alone: list[Completion]) -> None:
    await compare(open_tiny, alone, {"ranks__live": "process"})


async def compare(open_tiny: OpenEngine, alone: list[Completion], settings: dict[str, Any]) -> None:
    if not alone:
        kept = {key: settings[key] for key in settings if key.startswith("cache__")}
        async with open_tiny(**SETTINGS, **kept) as engine:
            alone += await finish_all(engine)
    async with open_tiny(**SETTINGS, **settings) as engine:
        check_same(await finish_all(engine), alone)
        await wait_answered(engine)
        state = await engine.debug_state()
        assert state.silent == ()
        assert {rank.reported_step for rank in state.ranks} == {state.planner.step - 1}
        assert {rank.digest for rank in state.ranks} == {f"{state.planner.digest:08x}"}
        statistics = engine.statistics()
        assert statistics.restarts == 0
        assert statistics.planner.kv_pages_used == 0


@pytest.mark.slow
async def test_int8_kv_says_the_same_in_every_layout(open_tiny: OpenEngine) -> None:
    """Scales go with the heads that a rank has."""
    alone: list[Completion] = []
    for layout in ({}, LAYOUTS["tp 2"], LAYOUTS["pp 2, dp 2"], LAYOUTS["cp 2"]):
        await compare(open_tiny, alone, {**layout, "cache__kv_dtype": "int8"})


async def test_dynamic_chunks_say_the_same(open_tiny: OpenEngine) -> None:
    texts = []
    for settings in ({}, {"schedule__dynamic_chunks": True, "layout__pp": 2}):
        async with open_tiny(**SETTINGS, **settings) as engine:
            with trio.fail_after(30):
                texts.append([one.text for one in await finish_all(engine)])
    assert texts[0] == texts[1]


async def test_an_engine_opens_when_its_chunks_are_measured(open_tiny: OpenEngine) -> None:
    """A server that called itself ready before would keep its first clients waiting for seconds."""
    told: list[str] = []
    settings: Any = {"layout__pp": 2, "schedule__dynamic_chunks": True}
    settings["progress"] = lambda done, total, what: told.append(what)
    async with open_tiny(**SETTINGS, **settings) as engine:
        assert not engine._leader.planner.profiling
        assert engine.statistics().planner.steps >= 30
    assert told[-1] == "measuring how long chunks of a prompt take"


async def test_ranks_that_fail_while_they_are_measured_are_told_to_whoever_opens(
    open_tiny: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise ArithmeticError("told to fail")

    monkeypatch.setattr(Runner, "forward", fail)
    settings = {"layout__pp": 2, "schedule__dynamic_chunks": True, "ranks__restarts_max": 1}
    with pytest.raises(AserveError, match=r"the ranks broke 2 times .* told to fail"):
        async with open_tiny(**SETTINGS, **settings):
            pytest.fail("it opened")


@pytest.mark.slow
async def test_more_than_four_ranks_live_in_processes_by_themselves(
    open_tiny: OpenEngine, alone: list[Completion]
) -> None:
    """world 8: two stages of dp 2 x cp 2, and every expert-less axis beside."""
    axes = {"layout__pp": 2, "layout__tp": 4, "layout__dp": 2, "layout__cp": 2}
    async with open_tiny(**SETTINGS, **axes) as engine:
        assert (await engine.debug_state()).live == "process"
        done = await finish_all(engine)
    if alone:
        check_same(done, alone)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp 2", "pp 2", "dp 2", "cp 2", "pp 2, tp 2"])
@pytest.mark.parametrize("live", ["inline", "thread"])
async def test_a_rank_that_dies_beside_others_in_a_step_loses_nothing(
    open_tiny: OpenEngine,
    alone: list[Completion],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    live: str,
) -> None:
    """Its peers stand in a collective, or wait for what it computes."""
    if not alone:
        async with open_tiny(**SETTINGS) as engine:
            alone += await finish_all(engine)
    deaths = [3, 9]
    forward = Runner.forward

    def dying(self: Runner, work: Work, inward: Any) -> Any:
        if self.rank == len(deaths) - 1 and work.step == deaths[-1]:
            deaths.pop()
            raise ArithmeticError("told to die")
        return forward(self, work, inward)

    monkeypatch.setattr(Runner, "forward", dying)
    async with open_tiny(**SETTINGS, **LAYOUTS[layout], ranks__live=live) as engine:
        with trio.fail_after(30):
            check_same(await finish_all(engine), alone)
        assert engine.statistics().restarts == 2
        assert "told to die" in (engine.last_break or "")
        await wait_answered(engine)
        assert engine.statistics().planner.kv_pages_used == 0


@pytest.mark.slow
async def test_a_rank_that_keeps_others_waiting_is_named(
    open_tiny: OpenEngine, alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    forward = Runner.forward

    def late(self: Runner, work: Work, inward: Any) -> Any:
        if self.rank == 1 and work.step == 4 and not release.is_set():
            release.wait(5)
        return forward(self, work, inward)

    monkeypatch.setattr(Runner, "forward", late)
    settings: dict[str, Any] = {**LAYOUTS["tp 2"], "ranks__live": "thread", "ranks__plane_s": 0.2}
    async with open_tiny(**SETTINGS, **settings) as engine:
        generations = [(engine.generate(prompt, params), params) for prompt, params in REQUESTS]
        with trio.fail_after(10):
            while engine.state is State.SERVING:
                with trio.move_on_after(0.01):  # a break in the making is no progress
                    await engine.wait_progress()
        release.set()
        with trio.fail_after(30):
            for one, params in generations:
                assert (await collect(one, (), params)).error is None
        assert "PlaneTimeout" in (engine.last_break or "")
        assert "rank 1" in (engine.last_break or "")
