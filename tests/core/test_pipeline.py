"""Several plans in flight: chunks of one prompt fill the pipe, and what that means for pages."""

import msgspec
import pytest

from aserve.core import pages
from aserve.core.config import Layout
from aserve.core.message import Result, StepPlan
from tests.core.deployment import Deployment


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def planned(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    assert plan is not None
    return [(one.seq, one.start, len(one.tokens)) for batch in plan.batches for one in batch.rows]


def pipe(**settings: object) -> Deployment:
    return Deployment(
        **{"page_size": 4, "pages_total": 60, "layout": Layout(pp=3), "step_tokens": 8, **settings}
    )


def test_chunks_of_one_prompt_fill_the_pipe() -> None:
    deployment = pipe()
    deployment.ask(0, prompt(0, 30))
    plans = [deployment.plan_one() for _ in range(3)]
    assert [planned(plan) for plan in plans] == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 8)]]
    assert [plan.microbatch for plan in plans if plan is not None] == [0, 1, 2]
    assert deployment.plan_one() is None
    assert deployment.planner.state().prefilling == (1,)
    deployment.report_one()
    last = deployment.plan_one()
    assert planned(last) == [(0, 24, 6)]
    assert deployment.planner.state().prefilling == (0,)
    while deployment.reports:
        deployment.report_one()
    plan = deployment.plan_one()
    assert plan is not None
    assert plan.microbatch == 0  # where it joined
    assert planned(plan) == [(0, 30, 1)]
    assert [commit.seq for commit in plan.commits] == [0]  # chunks were no news
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_two_long_prompts_share_the_pipe_in_order() -> None:
    deployment = pipe()
    deployment.ask(0, prompt(0, 18))
    deployment.ask(1, prompt(20, 18))
    plans = [planned(deployment.plan_one()) for _ in range(3)]
    assert plans == [[(0, 0, 8)], [(0, 8, 8)], [(0, 16, 2), (1, 0, 4)]]
    deployment.pump()
    deployment.check_texts()


@pytest.mark.parametrize("n_reports", [0, 1, 2])
def test_an_abort_keeps_the_pages_until_the_last_chunk_in_flight_landed(n_reports: int) -> None:
    deployment = pipe()
    deployment.ask(0, prompt(0, 40))
    for _ in range(3):
        deployment.plan_one()
    table = list(deployment.replica.sequences[0].pages)
    for _ in range(n_reports):
        deployment.report_one()
    deployment.finish(0)
    pool = deployment.planner._groups[0].pool
    for _ in range(3 - n_reports):
        assert all(pool.place(page) != pages.FREE for page in table)
        assert deployment.planner.state().leaving == (1,)
        deployment.report_one()
    assert deployment.planner.state().leaving == (0,)
    statistics = deployment.planner.statistics()
    assert (statistics.kv_pages_used, statistics.kv_pages_cached) == (0, 6)  # all that was computed
    deployment.check_idle()


def test_who_needs_a_chunk_in_flight_waits_for_its_report_only() -> None:
    deployment = pipe(pages_total=100)
    deployment.ask(0, prompt(0, 40))
    deployment.ask(1, [*prompt(0, 8), 39, 39], seed=1)
    deployment.plan_one()
    deployment.plan_one()
    assert deployment.planner.statistics().waiting == 1
    deployment.report_one()  # the first chunk is cached, the second is in flight
    assert planned(deployment.plan_one()) == [(0, 16, 8)]
    deployment.report_one()
    deployment.pump()
    assert deployment.ends[1].cached_len == 8
    deployment.check_texts()
    deployment.check_idle()


def test_prompt_logprobs_of_chunks_in_flight_come_whole_and_in_order() -> None:
    deployment = pipe()
    deployment.ask(0, prompt(0, 30), prompt_logprobs=0, logprobs=0)
    deployment.pump()
    entries = [entry.token for one in deployment.outputs for entry in one.prompt_logprobs]
    assert entries == prompt(0, 30)[1:]
    deployment.check_texts()


def test_an_error_in_a_chunk_ends_it_and_what_is_in_flight_only_lands() -> None:
    deployment = pipe()
    deployment.ask(0, prompt(0, 40))
    deployment.ask(1, prompt(9, 3))
    for _ in range(3):
        deployment.plan_one()
    index = next(at for at, one in enumerate(deployment.reports) if one.results)
    spoilt = msgspec.structs.replace(
        deployment.reports[index], results=(Result(0, (), (), error="NaN"),)
    )
    deployment.reports[index] = spoilt
    deployment.report_one()
    assert deployment.ends[0].finish_reason == "error"
    deployment.report_one()
    deployment.report_one()
    assert deployment.planner.statistics().kv_pages_cached == 0
    del deployment.requests[0]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize(("n_sequences", "prompt_len"), [(7, 3), (9, 3), (7, 20), (4, 33)])
def test_microbatches_fill_evenly(n_sequences: int, prompt_len: int) -> None:
    deployment = pipe(pages_total=400, step_tokens=16, running_max=30)
    for seq in range(n_sequences):
        deployment.ask(seq, prompt(seq * 5, prompt_len), max_tokens=60)
    for _ in range(60):
        while deployment.plan_one() is not None:
            pass
        deployment.report_one()
    cells = deployment.planner._composer.cells
    sizes = [len(cell) for groups in cells for cell in groups]
    assert sum(sizes) == n_sequences
    assert max(sizes) - min(sizes) <= 1
    deployment.pump()
    deployment.check_texts()


def test_few_who_fit_are_spread_over_the_microbatches_though_many_wait() -> None:
    deployment = pipe(pages_total=30, step_tokens=64, running_max=30)
    for seq in range(30):
        deployment.ask(seq, prompt(seq * 5, 9), max_tokens=20)  # room for four or so
    for _ in range(3):
        deployment.plan_one()
    sizes = [len(cell) for groups in deployment.planner._composer.cells for cell in groups]
    assert max(sizes) - min(sizes) <= 1
    deployment.pump()
    deployment.check_texts()


def run_until_yielding(deployment: Deployment) -> None:
    while True:
        blocked = deployment.plan_one() is None
        if deployment.planner.state().yielding != (0,):
            return
        if blocked or len(deployment.reports) > 2:
            deployment.report_one()


def crowded(victim_priority: int = 0) -> Deployment:
    """Two sequences in different microbatches, in a pool that cannot hold both to their end."""
    deployment = Deployment(
        page_size=2, pages_total=12, step_tokens=16, layout=Layout(pp=2), prefix_cache=False
    )
    deployment.planner._composer.ratio.value = 1 << 17
    deployment.ask(0, prompt(0, 4), max_tokens=15)
    deployment.ask(1, prompt(20, 4), max_tokens=15, priority=victim_priority)
    return deployment


def test_a_victim_in_flight_elsewhere_yields_when_it_landed_and_keeps_its_token() -> None:
    deployment = crowded(victim_priority=1)
    planner = deployment.planner
    run_until_yielding(deployment)
    assert planner.statistics().retractions == 0
    n_known = len(deployment.texts[1])
    while planner.statistics().retractions == 0:
        assert deployment.plan_one() is None  # nobody gets its pages before they are free
        deployment.report_one()
    assert len(deployment.texts[1]) == n_known + 1
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_an_abort_of_who_is_to_yield_is_an_abort() -> None:
    deployment = crowded(victim_priority=1)
    run_until_yielding(deployment)
    deployment.finish(1)
    assert deployment.planner.state().yielding == (0,)
    deployment.pump()
    assert deployment.planner.statistics().retractions == 0
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize("in_flight_max", [2, 3, 4])
def test_microbatches_do_not_retract_each_other_for_ever(in_flight_max: int) -> None:
    deployment = Deployment(
        page_size=1, pages_total=24, step_tokens=8, in_flight_max=in_flight_max, running_max=8
    )
    for seq in range(8):
        deployment.planner._composer.ratio.value = 1 << 17
        deployment.ask(seq, prompt(seq * 3, 5), max_tokens=18)
    deployment.pump()
    retractions = deployment.planner.statistics().retractions
    assert 0 < retractions <= 8 * 18
    deployment.check_texts()
    deployment.check_idle()
