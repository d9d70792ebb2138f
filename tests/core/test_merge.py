"""Reports of many ranks: when a step is over, whose results count, and which reports cannot be."""

from collections.abc import Callable

import msgspec
import pytest

from aserve.core.config import Layout
from aserve.core.message import StepReport
from aserve.core.status import PageLedger, RankProgress, StepInFlight
from aserve.errors import Desync
from tests.core.deployment import Deployment

# 2 stages of 2 groups of 2 ranks: ranks 4 and 6 lead.
LAYOUT = Layout(pp=2, tp=4, dp=2)


def grid() -> Deployment:
    deployment = Deployment(layout=LAYOUT, page_size=4, pages_total=20)
    deployment.ask(0, [1, 2, 3])
    deployment.ask(1, [9, 8, 7])
    deployment.plan_one()
    return deployment


def test_only_leaders_of_the_last_stage_carry_results() -> None:
    deployment = grid()
    assert [len(report.results) for report in deployment.reports] == [0, 0, 0, 0, 1, 0, 1, 0]
    assert [report.results[0].seq for report in deployment.reports if report.results] == [0, 1]


def test_nothing_goes_out_before_the_last_rank_agreed() -> None:
    deployment = grid()
    reports = {report.rank: report for report in deployment.reports}
    deployment.reports.clear()
    planner = deployment.planner
    for rank in (6, 4, 0, 1, 2, 3, 5):  # the leaders first: group 1's, then group 0's
        assert planner.report(reports[rank]) == ()
        assert planner.plan() is None  # its one microbatch with work is still in flight
    assert planner.state().in_flight == (StepInFlight(0, 0, (7,)),)
    assert [output.seq for output in planner.report(reports[7])] == [0, 1]
    assert planner.state().in_flight == ()
    assert planner.plan() is not None


def test_a_rank_out_of_step_keeps_what_was_drawn_with_it_from_the_clients() -> None:
    deployment = grid()
    planner, reports = deployment.planner, list(deployment.reports)
    deployment.reports.clear()
    outputs = [output for report in reports[:7] for output in planner.report(report)]
    spoilt = msgspec.structs.replace(reports[7], digest=reports[7].digest ^ 1)
    with pytest.raises(Desync, match="rank 7 at step 0"):
        planner.report(spoilt)
    assert outputs == []


@pytest.mark.parametrize("aborted", [False, True])
def test_who_is_over_keeps_its_pages_until_the_last_rank_reported(aborted: bool) -> None:
    deployment = Deployment(layout=LAYOUT, page_size=4, pages_total=20, prefix_cache=False)
    deployment.ask(0, [1, 2, 3], max_tokens=1)
    deployment.plan_one()
    reports = sorted(deployment.reports, key=lambda report: -report.rank)
    for report in reports[:-1]:
        deployment.planner.report(report)
    if aborted:
        deployment.planner.finish(0, "abort")
    statistics = deployment.planner.statistics()
    assert (statistics.running, statistics.kv_pages_used) == (0 if aborted else 1, 1)
    deployment.planner.report(reports[-1])
    statistics = deployment.planner.statistics()
    assert (statistics.running, statistics.kv_pages_used) == (0, 0)


def changed(index: int, **changes: object) -> Callable[[Deployment], StepReport]:
    return lambda deployment: msgspec.structs.replace(deployment.reports[index], **changes)


def twice(deployment: Deployment) -> StepReport:
    deployment.planner.report(deployment.reports[3])
    return deployment.reports[3]


def ahead(deployment: Deployment) -> StepReport:
    deployment.ask(2, [5, 5])
    deployment.ask(3, [6, 6])
    deployment.plan_one()
    return next(one for one in deployment.reports if (one.step, one.rank) == (1, 2))


def stolen(deployment: Deployment) -> StepReport:
    results = deployment.reports[4].results
    return msgspec.structs.replace(deployment.reports[5], results=results)


def of_the_other_group(deployment: Deployment) -> StepReport:
    results = deployment.reports[6].results
    return msgspec.structs.replace(deployment.reports[4], results=results)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (twice, "rank 3 at step 0: reported already"),
        (changed(3, step=9), "rank 3 at step 9: reports a step that is not in flight"),
        (changed(3, step=-1), "rank 3 at step -1: reported already"),
        (ahead, "rank 2 at step 1: reported out of order, after step -1"),
        (changed(3, digest=1), "rank 3 at step 0: digest 00000001, the planner's is"),
        (changed(3, rank=8), "rank 8 at step 0: no such rank in a grid of 8"),
        (changed(3, rank=-1), "rank -1 at step 0: no such rank"),
        (stolen, "rank 5 at step 0: 1 results for 0 sequences: it leads no group"),
        (changed(4, results=()), "rank 4 at step 0: 0 results for 1 sequences"),
        (of_the_other_group, "rank 4 at step 0: a result for sequence 1 where 0 was due"),
    ],
)
def test_a_report_that_cannot_be_is_a_desync_and_changes_nothing(
    report: Callable[[Deployment], StepReport], words: str
) -> None:
    deployment = grid()
    wrong = report(deployment)
    before = deployment.planner.state()
    with pytest.raises(Desync, match=words):
        deployment.planner.report(wrong)
    assert deployment.planner.state() == before


def test_the_state_says_who_waits_for_whom_and_where_the_pages_are() -> None:
    deployment = Deployment(layout=LAYOUT, page_size=4, pages_total=20, overlap=1)
    deployment.ask(0, list(range(40)))
    deployment.plan_one()
    deployment.plan_one()
    digest = deployment.reports[0].digest
    for rank in (0, 6):
        report = next(one for one in deployment.reports if one.rank == rank)
        deployment.planner.report(report)
    state = deployment.planner.state()
    assert state.ranks[0] == RankProgress(0, 0, digest)
    assert state.ranks[6] == RankProgress(6, 0, digest)
    assert state.ranks[7] == RankProgress(7, -1, 0)
    assert state.busy == (True, True, False)
    others = (1, 2, 3, 4, 5, 7)
    assert state.in_flight == (StepInFlight(0, 0, others), StepInFlight(1, 1, tuple(range(8))))
    assert (state.step, state.waiting, state.running, state.prefilling) == (2, 0, (1, 0), (1, 0))
    assert state.pages == (PageLedger(10, 10, 0, 0), PageLedger(20, 0, 0, 0))
    assert state.chunks == "fixed"
