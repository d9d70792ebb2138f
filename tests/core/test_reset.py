"""New ranks in the middle of everything: the text goes on as if nothing had been."""

from random import Random

import pytest

from aserve.core.config import Layout
from aserve.errors import Desync
from tests.core.deployment import Deployment


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


LAYOUTS = [Layout(), Layout(pp=2), Layout(pp=2, dp=2, tp=4)]


def loaded(layout: Layout, draft_max: int) -> Deployment:
    deployment = Deployment(
        page_size=2, pages_total=24, layout=layout, draft_max=draft_max, running_max=6
    )
    deployment.planner._composer.ratio.value = 1 << 17
    for seq in range(7):
        tokens = [*prompt(0, 5), *prompt(seq * 7, 4 + 5 * (seq % 3))]
        deployment.ask(seq, tokens, max_tokens=14, seed=seq % 2, prompt_logprobs=0, logprobs=0)
    return deployment


def advance(deployment: Deployment, n_events: int) -> None:
    for event in range(n_events):
        if event % 3 == 2 and deployment.reports:
            deployment.report_rank(Random(event))
        elif deployment.plan_one() is None and deployment.reports:
            deployment.report_one()


def check(deployment: Deployment) -> None:
    deployment.check_texts()
    deployment.check_idle()
    for seq, request in deployment.requests.items():
        outputs = [output for output in deployment.outputs if output.seq == seq]
        entries = [entry.token for output in outputs for entry in output.prompt_logprobs]
        assert entries == list(request.tokens[1:])
        assert [entry.token for o in outputs for entry in o.logprobs] == deployment.texts[seq]


@pytest.mark.slow
@pytest.mark.parametrize("draft_max", [0, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["one", "pp2", "pp2 dp2"])
def test_a_reset_at_any_point_changes_no_text(layout: Layout, draft_max: int) -> None:
    for n_events in range(0, 60, 3):
        deployment = loaded(layout, draft_max)
        advance(deployment, n_events)
        known = {seq: list(text) for seq, text in deployment.texts.items()}
        deployment.reset()
        statistics = deployment.planner.statistics()
        assert statistics.kv_pages_free == statistics.kv_pages_total
        assert statistics.running == 0
        deployment.pump()
        for seq, text in known.items():
            assert deployment.texts[seq][: len(text)] == text
        check(deployment)


def test_many_resets_lose_nothing_and_each_step_between_them_counts() -> None:
    deployment = loaded(Layout(pp=2), 3)
    for n_events in range(2, 40):
        advance(deployment, n_events)
        deployment.reset()
    deployment.pump()
    check(deployment)


def test_who_ran_comes_first_in_its_class_in_the_old_order() -> None:
    deployment = Deployment(running_max=2)
    for seq, priority in enumerate((1, 1, 1, 0)):
        deployment.ask(seq, prompt(seq * 5, 3), max_tokens=9, priority=priority)
    deployment.step()
    running = list(deployment.replica.sequences)
    assert running == [3, 0]
    deployment.step()
    deployment.reset()
    assert [sequence.seq for sequence in deployment.planner._composer.queue] == [3, 0, 1, 2]
    plan = deployment.step()
    assert plan is not None
    assert [admit.seq for admit in plan.admits] == [3, 0]
    assert [len(admit.tokens) for admit in plan.admits] == [5, 5]  # what was reported is known
    deployment.pump()
    deployment.check_texts()


def test_what_was_over_but_in_flight_is_gone() -> None:
    deployment = Deployment(layout=Layout(pp=2))
    deployment.ask(0, prompt(0, 40), max_tokens=9)
    deployment.plan_one()
    deployment.plan_one()
    deployment.finish(0)
    assert deployment.planner.state().leaving == (1,)
    deployment.reset()
    assert deployment.planner.state().leaving == (0,)
    assert deployment.plan_one() is None
    deployment.check_idle()
    deployment.ask(1, prompt(0, 5))
    deployment.pump()
    deployment.check_texts()


def test_a_report_of_the_old_ranks_is_refused() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3))
    deployment.plan_one()
    report = deployment.reports[0]
    deployment.reset()
    with pytest.raises(Desync, match="not in flight"):
        deployment.planner.report(report)
    deployment.pump()
    deployment.check_texts()


def test_counts_since_the_start_go_on() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3), max_tokens=9)
    for _ in range(4):
        deployment.step()
    deployment.reset()
    deployment.pump()
    statistics = deployment.planner.statistics()
    assert statistics.steps == len(deployment.all_plans)
    assert statistics.requests == 1
    assert deployment.planner.state().step == len(deployment.plans)
    assert deployment.ends[0].cached_len == 0
