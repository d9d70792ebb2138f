"""Which reports are possible, and what paths through chains and trees mean."""

from collections.abc import Callable

import msgspec
import pytest

from aserve.core.message import Result, Rows, Sampling, StepReport, TokenLogprob
from aserve.core.request import Request
from aserve.core.sequence import Sequence
from aserve.core.verdict import objection, settle
from aserve.errors import Desync
from tests.core.deployment import Deployment

LOGPROB = TokenLogprob(3, -0.5, ())


def sequence(n_tokens: int, kv_len: int, max_tokens: int = 9, **sampling: object) -> Sequence:
    made = Sequence(Request(1, (5,) * n_tokens, max_tokens, Sampling(**sampling)), order=0)
    made.kv_len = kv_len
    return made


CHAIN = Rows(1, 4, (5, 5, 5), (), True, ())
CHUNK = Rows(1, 4, (5, 5), (), False, ())
# bonus 5, then drafts 8 | 9 below it, and 6 below 8
TREE = Rows(1, 6, (5, 8, 9, 6), (-1, 0, 0, 1), True, ())


@pytest.mark.parametrize(
    ("rows", "result"),
    [
        (CHAIN, Result(1, (0, 1, 2), (3,))),
        (CHUNK, Result(1, (0, 1), ())),
        (TREE, Result(1, (0,), (3,))),
        (TREE, Result(1, (0, 2), (9, 3))),
        (TREE, Result(1, (0, 1, 3), (8, 6, 3))),
        (CHAIN, Result(1, (), (), error="its logits were NaN")),
    ],
)
def test_possible_results_have_no_objection(rows: Rows, result: Result) -> None:
    assert objection(sequence(7, rows.start), rows, result) is None


@pytest.mark.parametrize(
    ("rows", "result", "words"),
    [
        (CHAIN, Result(2, (0, 1, 2), (3,)), "a result for sequence 2 where 1 was due"),
        (CHAIN, Result(1, (0, 1), (3,)), "no path"),
        (CHAIN, Result(1, (0, 2, 1), (3,)), "no path"),
        (CHAIN, Result(1, (0, 1, 2, 3), (3,)), "no path"),
        (CHAIN, Result(1, (0, 1, 2), ()), "drew 0 tokens, 1 were due"),
        (CHAIN, Result(1, (0, 1, 2), (3, 4)), "drew 2 tokens, 1 were due"),
        (CHUNK, Result(1, (0, 1), (3,)), "drew 1 tokens, 0 were due"),
        (TREE, Result(1, (), ()), "no path"),
        (TREE, Result(1, (0, 3), (6, 3)), "no path"),
        (TREE, Result(1, (0, 1, 2), (8, 9, 3)), "no path"),
        (TREE, Result(1, (0, 9), (8, 3)), "no path"),
        (TREE, Result(1, (0, 2), (8, 3)), "accepted drafts (9,) but drew (8, 3)"),
        (CHAIN, Result(1, (0, 1, 2), (-1,)), "drew -1, which is no token"),
        (TREE, Result(1, (0, 1), (8, 1 << 63)), "drew 9223372036854775808, which is no token"),
        (CHAIN, Result(1, (0, 1, 2), (3,), (LOGPROB,)), "sent 1 logprobs, 0 were due"),
        (CHAIN, Result(1, (0, 1, 2), (3,), (), (LOGPROB,)), "sent 1 prompt logprobs, 0 were"),
    ],
)
def test_impossible_results_are_named(rows: Rows, result: Result, words: str) -> None:
    wrong = objection(sequence(7, rows.start), rows, result)
    assert wrong is not None
    assert words in wrong


def test_logprobs_are_due_when_asked_for() -> None:
    asked = sequence(7, 4, logprobs=0, prompt_logprobs=2)
    full = Result(1, (0, 1, 2), (3,), (LOGPROB,), (LOGPROB,) * 2)
    assert objection(asked, CHAIN, full) is None
    for fewer in ({"logprobs": ()}, {"prompt_logprobs": (LOGPROB,)}):
        wrong = objection(asked, CHAIN, msgspec.structs.replace(full, **fewer))
        assert wrong is not None
        assert "were due" in wrong
    chunk = Result(1, (0, 1), (), (), (LOGPROB,) * 2)
    assert objection(asked, CHUNK, chunk) is None


def test_an_accepted_path_moves_kv_and_tokens_together() -> None:
    moved = sequence(7, 7)  # the root is planned
    commit, reason = settle(moved, TREE, Result(1, (0, 1, 3), (8, 6, 3)))
    assert reason is None
    assert moved.tokens == [5] * 7 + [8, 6, 3]
    assert moved.kv_len == moved.computed_len == 9  # the bonus token has no KV yet
    assert commit is not None
    assert (commit.path, commit.tokens, commit.done) == ((0, 1, 3), (8, 6, 3), False)


@pytest.mark.parametrize(
    ("max_tokens", "stop_ids", "reason", "n_kept", "kv_len"),
    [
        (9, (8,), "stop", 1, 8),
        (9, (6,), "stop", 2, 9),
        (9, (3,), "stop", 3, 9),
        (1, (), "length", 1, 8),
        (3, (), "length", 3, 9),
    ],
)
def test_tokens_after_the_end_do_not_count(
    max_tokens: int, stop_ids: tuple[int, ...], reason: str, n_kept: int, kv_len: int
) -> None:
    moved = sequence(7, 7, max_tokens, stop_ids=stop_ids)
    commit, ended = settle(moved, TREE, Result(1, (0, 1, 3), (8, 6, 3)))
    assert ended == reason
    assert commit is not None
    assert moved.tokens[7:] == [8, 6, 3][:n_kept]
    assert commit.tokens == (8, 6, 3)[:n_kept]
    assert commit.done
    assert moved.kv_len == moved.computed_len == 6 + len(commit.path) == kv_len


def reported(change: Callable[[StepReport], StepReport]) -> Deployment:
    deployment = Deployment()
    deployment.ask(0, [1, 2, 3])
    deployment.ask(1, [9, 8, 7])
    deployment.plan_one()
    deployment.reports[0] = change(deployment.reports[0])
    return deployment


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"digest": 1}, "rank 0 at step 0: digest 00000001, the planner's is"),
        ({"step": 4}, "rank 0 at step 4: reports a step that is not in flight"),
        ({"results": ()}, "rank 0 at step 0: 0 results for 2 sequences"),
        ({"rank": 3, "digest": 1}, "rank 3 at step 0: no such rank in a grid of 1"),
    ],
)
def test_a_report_that_cannot_be_is_a_desync_with_rank_and_step(
    changes: dict[str, object], words: str
) -> None:
    deployment = reported(lambda report: msgspec.structs.replace(report, **changes))
    with pytest.raises(Desync, match=words):
        deployment.report_one()


def test_results_stand_in_the_order_of_the_rows() -> None:
    deployment = reported(
        lambda report: msgspec.structs.replace(report, results=report.results[::-1])
    )
    with pytest.raises(Desync, match="a result for sequence 1 where 0 was due"):
        deployment.report_one()


def test_a_report_counts_once() -> None:
    deployment = reported(lambda report: report)
    report = deployment.reports[0]
    deployment.report_one()
    with pytest.raises(Desync, match="not in flight"):
        deployment.planner.report(report)


def test_an_error_ends_one_sequence_and_leaves_the_others_alone() -> None:
    def spoil(report: StepReport) -> StepReport:
        wrong = Result(0, (), (), error="its logits were NaN")
        return msgspec.structs.replace(report, results=(wrong, report.results[1]))

    deployment = reported(spoil)
    deployment.report_one()
    assert deployment.ends[0].finish_reason == "error"
    assert deployment.ends[0].error == "its logits were NaN"
    assert deployment.planner.statistics().kv_pages_cached == 0  # what may be wrong is not kept
    plan = deployment.step()
    assert plan is not None
    assert plan.drops == (0,)
    del deployment.requests[0]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_an_error_of_an_aborted_sequence_in_flight_only_lands() -> None:
    deployment = reported(
        lambda report: msgspec.structs.replace(
            report, results=(Result(0, (), (), error="NaN"), report.results[1])
        )
    )
    deployment.finish(0)
    deployment.report_one()
    assert deployment.ends[0].finish_reason == "abort"
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()
