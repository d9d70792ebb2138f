"""Rows that are planned before their tokens are known: when, and what becomes of one too many."""

from random import Random

import msgspec
import pytest

from aserve.core import pages
from aserve.core.config import Layout, Schedule
from aserve.core.depth import Depth, depth_of
from aserve.core.message import LAGGING, Sampling, StepPlan
from aserve.core.request import Request
from aserve.errors import Desync
from tests.core.deployment import Deployment, oracle

ONE_STAGE = Layout()


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def lagging(overlap: int = 1, **more: int | bool) -> Deployment:
    return Deployment(layout=ONE_STAGE, overlap=overlap, **{"pages_total": 20, **more})


def rows_of(plan: StepPlan | None) -> list[tuple[int, int, tuple[int, ...]]]:
    assert plan is not None
    return [(rows.seq, rows.start, rows.tokens) for batch in plan.batches for rows in batch.rows]


def test_a_row_is_planned_behind_the_draw_of_its_token() -> None:
    deployment = lagging()
    deployment.ask(0, prompt(0, 3), max_tokens=9)
    assert rows_of(deployment.plan_one()) == [(0, 0, (0, 1, 2))]
    assert rows_of(deployment.plan_one()) == [(0, 3, (LAGGING,))]
    assert deployment.plan_one() is None  # one is ahead of the one that is computed
    deployment.report_one()
    plan = deployment.plan_one()
    assert rows_of(plan) == [(0, 4, (LAGGING,))]
    assert plan is not None
    assert [commit.tokens for commit in plan.commits] == [(deployment.texts[0][0],)]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_who_waits_comes_in_behind_the_step_that_is_computed() -> None:
    deployment = lagging()
    deployment.ask(0, prompt(0, 3), max_tokens=9)
    deployment.plan_one()
    deployment.ask(1, prompt(20, 2), max_tokens=9)
    assert rows_of(deployment.plan_one()) == [(0, 3, (LAGGING,)), (1, 0, (20, 21))]


def test_no_row_is_planned_behind_the_last_draw() -> None:
    deployment = lagging(overlap=3)
    deployment.ask(0, prompt(0, 3), max_tokens=2)
    deployment.plan_one()
    assert rows_of(deployment.plan_one()) == [(0, 3, (LAGGING,))]
    assert deployment.plan_one() is None
    deployment.pump()
    assert len(deployment.all_plans) == 2
    deployment.check_texts()


def stopped(overlap: int = 1) -> Deployment:
    """A sequence whose fifth token is a stop id, and not before."""
    deployment = lagging(overlap, page_size=2)
    text = oracle(Request(0, tuple(prompt(0, 3)), 9, Sampling(seed=7)))
    assert text[4] not in text[:4]
    deployment.ask(0, prompt(0, 3), max_tokens=9, stop_ids=(text[4],))
    return deployment


def test_the_row_behind_a_stop_is_nobodys() -> None:
    deployment = stopped()
    while 0 not in deployment.ends:
        while deployment.plan_one() is not None:
            pass
        deployment.report_one()
    assert deployment.ends[0].finish_reason == "stop"
    assert len(deployment.texts[0]) == 5
    assert len(deployment.reports) == 1  # the row too many
    table = deployment.replica.sequences[0].pages
    pool = deployment.planner._groups[0].pool
    assert pages.OWNED in [pool.place(page) for page in table]
    assert deployment.report_one() == ()
    assert pages.OWNED not in [pool.place(page) for page in table]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_what_the_cache_keeps_does_not_depend_on_lag(overlap: int) -> None:
    deployment = stopped(overlap)
    deployment.pump()
    # 3 of the prompt and 5 generated, the last of which has no row that counts: 3 pages of 2.
    assert deployment.planner.statistics().kv_pages_cached == 3
    text = deployment.texts[0]
    deployment.ask(1, [*prompt(0, 3), *text, 9, 9], max_tokens=3)
    deployment.pump()
    deployment.check_texts()


@pytest.mark.parametrize("n_reports", range(5))
def test_an_abort_holds_the_pages_of_all_rows_in_flight(n_reports: int) -> None:
    deployment = lagging(overlap=2, page_size=2)
    deployment.ask(0, prompt(0, 3), max_tokens=12)
    for _ in range(n_reports):
        while deployment.plan_one() is not None:
            pass
        deployment.report_one()
    while deployment.plan_one() is not None:
        pass
    deployment.finish(0)
    pool = deployment.planner._groups[0].pool
    while deployment.reports:
        assert pool.n_owned > 0
        assert deployment.report_one() == ()
    assert pool.n_owned == 0
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_nobody_goes_without_a_page_for_a_row_that_lags() -> None:
    deployment = lagging(page_size=1, pages_total=9, prefix_cache=False)
    deployment.planner._composer.ratio.value = 1
    deployment.ask(0, prompt(0, 4), max_tokens=6)
    deployment.ask(1, prompt(20, 4), max_tokens=6)
    first = deployment.plan_one()
    assert [seq for seq, _, _ in rows_of(first)] == [0, 1]
    # One page is left: one row lags, the other one can wait, and nobody is retracted for it.
    assert rows_of(deployment.plan_one()) == [(0, 4, (LAGGING,))]
    assert deployment.planner.statistics().retractions == 0
    deployment.pump()
    assert deployment.planner.statistics().retractions > 0
    deployment.check_texts()
    deployment.check_idle()


def test_who_yields_has_no_more_rows_planned() -> None:
    n_yields = 0
    for seed in range(12):
        random = Random(seed)
        deployment = lagging(page_size=4, pages_total=8, prefix_cache=False)
        deployment.planner._composer.ratio.value = 1
        for seq in range(4):
            deployment.ask(seq, prompt(seq, 3 + seq), max_tokens=14, priority=random.randint(0, 1))
        yielding = deployment.planner._groups[0].yielding
        while True:
            plan = deployment.plan_one()
            if plan is not None:
                assert not [seq for seq, _, _ in rows_of(plan) if seq in yielding]
                n_yields += bool(yielding)
            elif deployment.reports:
                deployment.report_one()
            else:
                break
        deployment.check_texts()
        deployment.check_idle()
    assert n_yields > 0


def test_an_error_of_a_draw_takes_the_row_behind_it_along() -> None:
    deployment = lagging()
    deployment.ask(0, prompt(0, 3), max_tokens=9)
    deployment.ask(1, prompt(20, 3), max_tokens=9)
    deployment.plan_one()
    deployment.plan_one()
    report = deployment.reports.popleft()
    broken = msgspec.structs.replace(report.results[0], tokens=(), error="it broke")
    results = (broken, *report.results[1:])
    outputs = deployment._report(msgspec.structs.replace(report, results=results))
    assert [(output.seq, output.finish_reason) for output in outputs] == [(0, "error"), (1, None)]
    later = deployment.reports.popleft()
    broken = msgspec.structs.replace(later.results[0], tokens=(), error="nothing before")
    results = (broken, *later.results[1:])
    outputs = deployment._report(msgspec.structs.replace(later, results=results))
    assert [output.seq for output in outputs] == [1]
    deployment.pump()
    assert deployment.texts[1] == oracle(deployment.requests[1])
    deployment.check_idle()


def test_after_new_ranks_the_text_goes_on_from_what_was_told() -> None:
    deployment = lagging(overlap=2)
    deployment.ask(0, prompt(0, 3), max_tokens=12)
    for _ in range(4):
        while deployment.plan_one() is not None:
            pass
        deployment.report_one()
    known = list(deployment.texts[0])
    deployment.reset()
    plan = deployment.plan_one()
    assert plan is not None
    assert plan.admits[0].tokens == (*prompt(0, 3), *known)
    deployment.pump()
    deployment.check_texts()


def test_several_commits_of_one_sequence_come_in_order() -> None:
    deployment = lagging(overlap=2)
    deployment.ask(0, prompt(0, 3), max_tokens=12)
    for _ in range(3):
        deployment.plan_one()
    deployment.report_one()
    deployment.report_one()
    plan = deployment.plan_one()
    assert plan is not None
    assert [commit.tokens for commit in plan.commits] == [(t,) for t in deployment.texts[0]]
    deployment.pump()
    deployment.check_texts()


def test_a_rank_that_folds_another_token_is_out_of_step() -> None:
    deployment = lagging()
    deployment.ask(0, prompt(0, 3), max_tokens=12)
    deployment.plan_one()
    deployment.plan_one()
    deployment.report_one()

    def lie(plan: StepPlan) -> StepPlan:
        commits = [msgspec.structs.replace(commit, tokens=(1,)) for commit in plan.commits]
        return msgspec.structs.replace(plan, commits=tuple(commits))

    deployment.fault = lie
    assert deployment.texts[0] != [1]
    deployment.plan_one()
    deployment.report_one()
    with pytest.raises(Desync, match="digest"):
        deployment.report_one()


@pytest.mark.parametrize(
    ("layout", "overlap", "expected"),
    [
        (Layout(), None, Depth(1, 1)),
        (Layout(tp=4, dp=2, cp=2), None, Depth(1, 1)),
        (Layout(), 0, Depth(1, 0)),
        (Layout(), 2, Depth(1, 2)),
        (Layout(pp=2), None, Depth(2, 0)),  # the first stage does not draw
        (Layout(pp=2), 1, Depth(3, 0)),
    ],
)
def test_what_overlap_means(layout: Layout, overlap: int | None, expected: Depth) -> None:
    depth = depth_of(layout, Schedule(overlap=overlap))
    assert depth == expected
    assert depth.in_flight_max == depth.microbatches + depth.lag_max


@pytest.mark.parametrize("seed", range(6))
def test_random_loads_say_what_they_say_without_lag(seed: int) -> None:
    random = Random(seed)
    deployment = lagging(
        overlap=random.choice([1, 1, 2, 3]),
        page_size=random.choice([1, 2, 4]),
        pages_total=random.randint(30, 40),
        step_tokens=random.randint(8, 24),
    )
    for seq in range(12):
        length = random.randint(1, 12)
        stop_ids = tuple(random.sample(range(40), random.choice([0, 3])))
        deployment.ask(
            seq, prompt(random.randrange(40), length), random.randint(1, 14), stop_ids=stop_ids
        )
    for _ in range(80):
        if random.random() < 0.6:
            deployment.plan_one()
        elif deployment.reports:
            deployment.report_one()
        if random.random() < 0.03:
            deployment.finish(random.randrange(12))
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()
