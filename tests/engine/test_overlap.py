"""With rows that lag behind their tokens every text is what it is without, to the last bit."""

import threading
from typing import Any

import pytest
import trio

from aserve.actors.completion import Completion
from aserve.actors.compute import ComputeThread, open_compute_thread
from aserve.actors.engine import Engine
from aserve.actors.rank import run_rank
from aserve.core.message import StepPlan, StepReport
from aserve.core.request import SamplingParams, StructuredOutput

from .answers import REQUESTS, TEXT, asked, check_same, finish, finish_all
from .conftest import OpenEngine, wait_answered

ENDS: tuple[tuple[str, SamplingParams], ...] = (
    (TEXT[:40], asked(seed=11, max_tokens=40, stop=("e", "th"))),
    (TEXT[:41], asked(seed=12, max_tokens=40, ignore_eos=False, logit_bias={2: 4.0})),
    (TEXT[:42], asked(seed=13, structured_outputs=StructuredOutput(regex="[a-z]{3,9}x"))),
    (TEXT[:43], asked(seed=14, structured_outputs=StructuredOutput(choice=("dog", "fox")))),
    (TEXT[:44], asked(seed=15, max_tokens=1)),
    (TEXT[:45], asked(temperature=0, max_tokens=33, min_tokens=20, stop_token_ids=(5, 300))),
)


async def all_of(engine: Engine) -> list[Completion]:
    """Everything at once, beside clients that leave in the middle."""
    found: dict[int, Completion] = {}

    async def one(place: int) -> None:
        found[place] = await finish(engine, *ENDS[place])

    async def leave(n_deltas: int) -> None:
        generation = engine.generate(TEXT[:70], asked(seed=n_deltas, max_tokens=64))
        async with generation:
            async for _ in generation:
                n_deltas -= 1
                if not n_deltas:
                    return

    async with trio.open_nursery() as nursery:
        for place in range(len(ENDS)):
            nursery.start_soon(one, place)
        for n_deltas in (1, 2, 7):
            nursery.start_soon(leave, n_deltas)
        rest = await finish_all(engine)
    await wait_answered(engine)
    assert engine.statistics().planner.kv_pages_used == 0
    return [*[found[place] for place in range(len(ENDS))], *rest]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"schedule__step_tokens": 24, "cache__page_size": 4},
        {"cache__page_size": 4, "cache__kv_tokens": 200, "schedule__step_tokens": 64},
        {"layout__tp": 2},
        {"layout__tp": 2, "layout__dp": 2},
        {"layout__tp": 2, "layout__cp": 2},
    ],
    ids=["batch", "chunks", "retraction", "tp", "dp", "cp"],
)
async def test_a_mixed_load_says_the_same(open_tiny: OpenEngine, settings: dict[str, Any]) -> None:
    async with open_tiny(schedule__overlap=0) as engine:
        alone = await all_of(engine)
    for overlap in (1, 3):
        async with open_tiny(schedule__overlap=overlap, **settings) as engine:
            check_same(await all_of(engine), alone)


@pytest.mark.slow
async def test_without_overlap_the_same_holds_alone(open_tiny: OpenEngine) -> None:
    texts: list[list[Completion]] = []
    for overlap in (0, 1):
        async with open_tiny(schedule__overlap=overlap) as engine:
            texts.append([await finish(engine, *one) for one in (*ENDS, *REQUESTS)])
    check_same(texts[1], texts[0])


class Steps:
    """A runner whose steps last until they are let go; and the ends of planes without anybody."""

    has_previous = has_next = False
    rank = 0

    def __init__(self, n_plans: int) -> None:
        self.sender, self.plans = trio.open_memory_channel[StepPlan](n_plans)
        for step in range(n_plans):
            self.sender.send_nowait(StepPlan(step, 0, (), (), (), (), (), ()))
        self.sender.close()
        self.applied: list[int] = []
        self.begun: list[int] = []
        self.reported: list[int] = []
        self.let_go = threading.Semaphore(0)
        self.fails_at = -1

    def apply(self, plan: StepPlan) -> int:
        self.applied.append(plan.step)
        return plan.step

    def forward(self, work: int, inward: None) -> int:
        self.begun.append(work)
        self.let_go.acquire()
        if work == self.fails_at:
            raise ArithmeticError("told to fail")
        return work

    def report(self, plan: StepPlan, outward: int) -> StepReport:
        assert outward == plan.step
        self.reported.append(outward)
        return StepReport(outward, 0, 0, (), (), (), 0)


class Nobody:
    """The request plane's end of a rank: plans are there, reports are lost."""

    def __init__(self, plans: Any) -> None:
        self.plans = plans

    def report_nowait(self, report: StepReport) -> None:
        pass


async def until(steps: Steps, n_applied: int, n_begun: int) -> None:
    with trio.fail_after(5):
        while (len(steps.applied), len(steps.begun)) != (n_applied, n_begun):
            await trio.lowlevel.checkpoint()


async def test_the_next_plan_is_taken_up_while_a_step_is_computed() -> None:
    steps = Steps(4)
    async with open_compute_thread() as compute, trio.open_nursery() as nursery:
        nursery.start_soon(run_rank, steps, Nobody(steps.plans), steps, compute)
        await until(steps, 2, 1)  # the event loop goes on while the thread computes
        for done in range(1, 4):
            steps.let_go.release()
            await until(steps, min(4, 2 + done), 1 + done)
        steps.let_go.release()
    assert steps.applied == steps.begun == steps.reported == [0, 1, 2, 3]


async def test_between_two_steps_the_thread_waits_for_nobody() -> None:
    steps = Steps(2)
    async with open_compute_thread() as compute, trio.open_nursery() as nursery:
        nursery.start_soon(run_rank, steps, Nobody(steps.plans), steps, compute)
        await until(steps, 2, 1)
        steps.let_go.release()
        while len(steps.begun) < 2:  # the event loop is not given a chance to say anything
            pass
        assert steps.reported == []
        steps.let_go.release()
    assert steps.reported == [0, 1]


async def test_behind_a_step_that_failed_nothing_is_computed() -> None:
    steps = Steps(3)
    steps.fails_at = 0
    async with open_compute_thread() as compute:
        steps.let_go.release()
        with pytest.raises(ArithmeticError, match="told to fail"):
            await _run_alone(steps, compute)
    assert steps.begun == [0]
    assert steps.reported == []


async def _run_alone(steps: Steps, compute: ComputeThread) -> None:
    await run_rank(steps, Nobody(steps.plans), steps, compute)


async def test_cancelled_it_waits_out_the_step_and_forgets_the_next() -> None:
    steps = Steps(3)
    async with open_compute_thread() as compute, trio.open_nursery() as nursery:
        nursery.start_soon(_run_alone, steps, compute)
        await until(steps, 2, 1)
        nursery.cancel_scope.cancel()
        steps.let_go.release(3)
    assert steps.begun == [0]
