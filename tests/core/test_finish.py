"""Ending a sequence from above, in every phase and with rows in flight, and ends of its own."""

import pytest

from aserve.core import pages
from aserve.core.message import Grammar
from tests.core.deployment import VOCAB, Deployment, oracle


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def places(deployment: Deployment, table: list[int]) -> list[int]:
    return [deployment.planner._groups[0].pool.place(page) for page in table]


def test_abort_while_waiting_forgets_it() -> None:
    deployment = Deployment(running_max=1)
    for seq in range(3):
        deployment.ask(seq, prompt(seq, 3))
    deployment.step()
    output = deployment.finish(1)
    assert output is not None
    assert (output.finish_reason, output.tokens, output.cached_len) == ("abort", (), 0)
    assert deployment.planner.statistics().waiting == 1
    deployment.pump()
    assert list(deployment.ends) == [1, 0, 2]
    deployment.check_texts()
    deployment.check_idle()


def test_abort_between_steps_frees_its_pages_at_once_and_tells_the_ranks_next() -> None:
    deployment = Deployment(page_size=4, pages_total=20)
    deployment.ask(0, prompt(0, 9), max_tokens=9)
    deployment.ask(1, prompt(20, 3), max_tokens=9)
    deployment.step()
    deployment.finish(0)
    statistics = deployment.planner.statistics()
    assert statistics.running == 1
    assert statistics.kv_pages_used == 1  # the other one's
    assert statistics.kv_pages_cached == 2  # what was computed stays useful
    plan = deployment.step()
    assert plan is not None
    assert plan.drops == (0,)
    assert [(commit.seq, commit.done) for commit in plan.commits] == [(0, True), (1, False)]
    assert list(deployment.replica.sequences) == [1]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize("n_steps", [0, 1, 3])
def test_abort_with_rows_in_flight_keeps_its_pages_until_the_report(n_steps: int) -> None:
    deployment = Deployment(page_size=4, pages_total=20, step_tokens=8)
    deployment.ask(0, prompt(0, 14), max_tokens=9)
    for _ in range(n_steps):
        deployment.step()
    deployment.plan_one()
    table = deployment.replica.sequences[0].pages
    before = places(deployment, table)
    deployment.finish(0)
    assert places(deployment, table) == before
    assert pages.OWNED in before
    deployment.ask(1, prompt(5, 30), max_tokens=9)
    assert deployment.plan_one() is None
    assert deployment.report_one() == ()
    assert pages.OWNED not in places(deployment, table)
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_pages_of_an_aborted_sequence_in_flight_are_given_to_nobody() -> None:
    deployment = Deployment(page_size=2, pages_total=8, step_tokens=16, in_flight_max=2)
    deployment.ask(0, prompt(0, 8), max_tokens=4)
    deployment.plan_one()
    deployment.finish(0)
    deployment.ask(1, prompt(20, 8), max_tokens=4)
    plan = deployment.plan_one()
    assert plan is not None
    used = {page for batch in plan.batches for rows in batch.rows for page in rows.pages}
    assert not used & set(deployment.replica.sequences[0].pages)
    deployment.ask(2, prompt(30, 8), max_tokens=4)  # fits only into what is in flight
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_abort_after_a_retraction_takes_it_from_the_queue() -> None:
    deployment = Deployment(page_size=2, pages_total=12, step_tokens=16)
    deployment.planner._composer.ratio.value = 1 << 17
    deployment.ask(0, prompt(0, 4), max_tokens=13)
    deployment.ask(1, prompt(20, 4), max_tokens=13)
    while not deployment.planner.statistics().waiting or not deployment.plans:
        deployment.step()
    assert deployment.planner.statistics().retractions == 1
    assert deployment.finish(1) is not None
    deployment.pump()
    assert deployment.texts[1]
    deployment.check_texts()
    deployment.check_idle()


def test_finishing_what_is_over_changes_nothing() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3), max_tokens=1)
    deployment.pump()
    assert deployment.finish(0) is None
    assert deployment.finish(99) is None
    deployment.ask(1, prompt(0, 3))
    deployment.step()
    assert deployment.finish(1, "stop") is not None
    assert deployment.finish(1, "stop") is None


def test_a_stop_from_above_keeps_the_computed_pages() -> None:
    deployment = Deployment(page_size=4, pages_total=20)
    deployment.ask(0, prompt(0, 8), max_tokens=9)
    deployment.step()
    output = deployment.finish(0, "stop")
    assert output is not None
    assert output.finish_reason == "stop"
    assert deployment.planner.statistics().kv_pages_cached == 2


def test_a_stop_id_ends_the_text_and_is_its_last_token() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3), max_tokens=20)
    expected = oracle(deployment.requests[0])
    deployment.pump()
    assert deployment.ends[0].finish_reason == "length"
    assert deployment.ends[0].stop_token is None
    stop = expected[6]
    first = expected.index(stop)
    deployment.ask(1, prompt(0, 3), max_tokens=20, stop_ids=(stop,))
    deployment.pump()
    assert deployment.texts[1] == expected[: first + 1]
    assert deployment.ends[1].finish_reason == "stop"
    assert deployment.ends[1].stop_token == stop


def test_a_stop_id_as_the_last_allowed_token_is_a_stop() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3), max_tokens=1)
    token = oracle(deployment.requests[0])[0]
    deployment.ask(1, prompt(0, 3), max_tokens=1, stop_ids=(token,))
    deployment.pump()
    assert deployment.ends[1].finish_reason == "stop"


def test_the_last_commit_of_a_finished_sequence_travels_with_its_drop() -> None:
    deployment = Deployment(in_flight_max=2)
    deployment.ask(0, prompt(0, 3), max_tokens=1)
    deployment.ask(1, prompt(9, 3), max_tokens=5)
    deployment.plan_one()
    deployment.plan_one()
    deployment.report_one()  # the first ends; the second's microbatch plans next
    deployment.report_one()
    plan = deployment.plan_one()
    assert plan is not None
    assert plan.microbatch == 1
    assert [(commit.seq, commit.done) for commit in plan.commits] == [(0, True), (1, False)]
    assert plan.drops == (0,)
    deployment.report_one()
    deployment.pump()
    deployment.check_texts()


def test_a_seq_may_be_used_again_when_it_is_over() -> None:
    deployment = Deployment()
    deployment.ask(0, prompt(0, 3), max_tokens=2)
    deployment.pump()
    del deployment.ends[0]
    deployment.ask(0, prompt(5, 3), max_tokens=2)
    deployment.pump()
    deployment.check_texts()


def test_the_end_of_a_complete_grammar_is_the_end_before_min_tokens_too() -> None:
    everything = tuple(range(VOCAB))
    deployment = Deployment()
    grammar = Grammar("regex", "a")
    deployment.ask(0, (1, 2), 9, min_tokens=5, stop_ids=everything, grammar=grammar)
    deployment.ask(1, (1, 2), 9, min_tokens=5, stop_ids=everything)
    deployment.pump()
    assert deployment.ends[0].finish_reason == deployment.ends[1].finish_reason == "stop"
    assert [len(deployment.texts[seq]) for seq in (0, 1)] == [1, 6]
