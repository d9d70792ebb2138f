"""Rank processes that are killed, stopped or left behind: nothing is lost, nobody stays."""

import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from aserve.actors.child import Child
from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.actors.supervision import State
from aserve.core.request import SamplingParams
from aserve.errors import ConfigError

from .conftest import OpenEngine, wait_answered

pytestmark = pytest.mark.slow

TEXT = "Once upon a time the dog said that it would not mind, and the fox jumped over it. " * 4
N_POINTS = 20
SEEN_S = 1.0  # within which a death is known


def children(engine: Engine) -> list[Child]:
    placement: Any = engine._supervisor._placement
    found: list[Child] = placement.children
    return found


def asked(at: int, n_tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        max_tokens=n_tokens, seed=at, temperature=0.8 if at % 2 else 0, ignore_eos=True
    )


def ask_all(engine: Engine, n_tokens: int = 24) -> Callable[[], Any]:
    """Three requests, of one chunk and of several; what they say when awaited."""
    prompts = (TEXT[:10], TEXT[:120], TEXT[:300])
    generations = [engine.generate(TEXT[: len(p)], asked(at)) for at, p in enumerate(prompts)]

    async def finish() -> list[Completion]:
        return [await collect(one, (), asked(at)) for at, one in enumerate(generations)]

    return finish


async def texts(engine: Engine) -> list[str]:
    with trio.fail_after(60):
        done = await ask_all(engine)()
    assert [one.error for one in done] == [None, None, None]
    return [one.text for one in done]


async def wait_steps(engine: Engine, n_steps: int) -> None:
    while engine.statistics().planner.steps < n_steps:
        await engine.wait_progress()


async def wait_state(engine: Engine, state: State, limit_s: float) -> None:
    with trio.fail_after(limit_s):
        while engine.state is not state:
            with trio.move_on_after(0.005):
                await engine.wait_progress()


@pytest.fixture(scope="module")
def right(tiny_model_path: pathlib.Path) -> list[str]:
    """What one rank says."""
    from aserve.actors.engine import open_engine

    async def said() -> list[str]:
        settings: Any = {"compute__threads": 1, "cache__kv_tokens": 4096}
        async with open_engine(tiny_model_path, schedule__step_tokens=48, **settings) as engine:
            return await texts(engine)

    return trio.run(said)


@pytest.mark.parametrize(("axis", "first"), [("layout__tp", 0), ("layout__pp", 1)])
async def test_killing_a_rank_at_each_of_many_points_loses_nothing(
    open_tiny: OpenEngine, right: list[str], axis: str, first: int
) -> None:
    """The even points of a run, from its first step to its last, in one layout, the odd in the
    other."""
    settings = {axis: 2, "ranks__live": "process", "schedule__step_tokens": 48}
    async with open_tiny(**settings, schedule__prefix_cache=False) as engine:
        for count, point in enumerate(range(first, N_POINTS, 2), 1):
            finish = ask_all(engine)
            steps, rank = engine.statistics().planner.steps, point // 2 % 2
            await wait_steps(engine, steps + 1 + 3 * point // 2)
            os.kill(children(engine)[rank].pid, signal.SIGKILL)
            await wait_state(engine, State.RESTARTING, SEEN_S)
            assert not engine.ready
            with trio.fail_after(60):
                done = await finish()
            assert [one.error for one in done] == [None, None, None]
            assert [one.text for one in done] == right, point
            assert engine.statistics().restarts == count
            assert f"rank {rank} died" in (engine.last_break or "")
        await wait_answered(engine)
        assert engine.ready
        assert engine.statistics().planner.kv_pages_used == 0


async def test_a_rank_that_dies_while_nobody_asks_is_replaced(
    open_tiny: OpenEngine, right: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with open_tiny(layout__tp=2, ranks__live="process", schedule__step_tokens=48) as engine:
        old = [child.pid for child in children(engine)]
        os.kill(old[1], signal.SIGKILL)
        await wait_state(engine, State.RESTARTING, SEEN_S)
        state = await engine.debug_state()
        assert state.silent == (0, 1)
        assert "rank 1 died" in (state.last_break or "")
        assert await texts(engine) == right
        assert "rank 1: its process was ended by SIGKILL" in caplog.text
        assert "rank 0: its process" not in caplog.text
        assert not set(old) & {child.pid for child in children(engine)}


@pytest.mark.parametrize("axis", ["layout__tp", "layout__pp"])
async def test_a_rank_that_stands_still_is_named_within_the_limit(
    open_tiny: OpenEngine, right: list[str], axis: str
) -> None:
    limit_s = 2.0
    settings = {axis: 2, "ranks__live": "process", "schedule__step_tokens": 48}
    async with open_tiny(**settings, ranks__plane_s=limit_s) as engine:
        finish = ask_all(engine)
        await wait_steps(engine, 4)
        os.kill(children(engine)[1].pid, signal.SIGSTOP)
        state = await engine.debug_state(0.2)
        assert state.silent == (1,)
        await wait_state(engine, State.RESTARTING, limit_s)
        assert "PlaneTimeout: rank 1" in (engine.last_break or "")
        with trio.fail_after(60):
            assert [one.text for one in await finish()] == right


async def test_restarts_used_up_fail_with_the_reason(
    open_tiny: OpenEngine, tiny_model_path: pathlib.Path
) -> None:
    async with open_tiny(layout__tp=2, ranks__live="process", ranks__restarts_max=0) as engine:
        finish = ask_all(engine)
        os.kill(children(engine)[0].pid, signal.SIGKILL)
        with trio.fail_after(10):
            done = await finish()
        assert [one.finish_reason for one in done] == ["error"] * 3
        assert "rank 0 died" in (done[0].error or "")
        assert engine.state is State.FAILED
        assert "rank 0 died" in (engine.failure or "")
        assert children(engine) == []


async def test_what_a_rank_cannot_load_is_the_operators_to_hear(
    open_tiny: OpenEngine,
) -> None:
    with pytest.raises(ConfigError, match="pages"):
        async with open_tiny(layout__tp=2, ranks__live="process", cache__kv_tokens=16):
            pytest.fail("it opened")


async def test_ranks_that_never_join_are_named(open_tiny: OpenEngine) -> None:
    from aserve.errors import PlaneTimeout

    with pytest.raises(PlaneTimeout, match=r"ranks 0, 1 have not joined after 0\.1 s"):
        async with open_tiny(layout__tp=2, ranks__live="process", ranks__start_s=0.1):
            pytest.fail("it opened")


async def test_progress_is_told_for_each_rank(open_tiny: OpenEngine) -> None:
    told: list[tuple[int, int, str]] = []
    settings: Any = {"progress": lambda *step: told.append(step)}
    async with open_tiny(layout__tp=2, ranks__live="process", **settings):
        pass
    assert (0, 0, "starting 2 processes") in told
    for rank in range(2):
        mine = [step for step in told if step[2] == f"rank {rank}: loading weights"]
        assert mine[-1][0] == mine[-1][1]


LEADER = """
import os, signal, sys, trio
from aserve.actors.engine import open_engine
async def main():
    settings = {"compute__threads": 1, "cache__kv_tokens": 4096, "layout__tp": 2}
    async with open_engine(sys.argv[1], ranks__live="process", **settings) as engine:
        children = engine._supervisor._placement.children
        print(*[child.pid for child in children], flush=True)
        if sys.argv[2] == "stopped":
            os.kill(children[1].pid, signal.SIGSTOP)
        if sys.argv[2] in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "raises":
            raise KeyError("mine")
trio.run(main)
"""


@pytest.mark.parametrize("way", ["returns", "raises", "killed", "stopped"])
def test_no_rank_outlives_its_leader(tiny_model_path: pathlib.Path, way: str) -> None:
    command = [sys.executable, "-c", LEADER, str(tiny_model_path), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    codes = {"returns": 0, "raises": 1, "killed": -signal.SIGKILL, "stopped": -signal.SIGKILL}
    assert done.returncode == codes[way]
    for pid in pids:
        assert gone_within(pid, 5.0), pid


def gone_within(pid: int, limit_s: float) -> bool:
    """Whether a process that is not ours to wait for has ended (or is a zombie of init's)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd)
        return bool(poll.poll(limit_s * 1000))
    finally:
        os.close(pidfd)


@pytest.mark.parametrize(("seconds", "requests_max"), [(5.0, 6), (120.0, 10**9)])
async def test_random_aborts_in_processes_leave_every_page_free_and_no_process(
    open_tiny: OpenEngine, seconds: float, requests_max: int
) -> None:
    from .test_soak import SMALL, soak

    threads = threading.active_count()
    async with open_tiny(**SMALL, layout__pp=2, layout__tp=2, ranks__live="process") as engine:
        pids = [child.pid for child in children(engine)]
        counts = await soak(engine, seconds, requests_max)
        assert engine.statistics().restarts == 0
    assert counts["finished"] > 0, counts
    if seconds > 30:
        assert min(counts.values()) > 0, counts
    assert all(gone_within(pid, 0) for pid in pids)
    assert threading.active_count() <= threads + 1
