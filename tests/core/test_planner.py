"""What the planner promises about steps, sharing, priorities and limits, one scenario each."""

import pytest

from aserve.core.group import IDLE_SHARE
from aserve.core.message import StepPlan
from aserve.errors import RequestError
from tests.core.deployment import Deployment


def planned(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """(seq, start, rows) of a plan's rows, groups in order."""
    assert plan is not None
    return [
        (rows.seq, rows.start, len(rows.tokens)) for batch in plan.batches for rows in batch.rows
    ]


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def test_a_long_prompt_goes_in_page_aligned_chunks_mixed_with_decode() -> None:
    deployment = Deployment(page_size=4, pages_total=30, step_tokens=10)
    deployment.ask(0, prompt(0, 3), max_tokens=9)
    assert planned(deployment.step()) == [(0, 0, 3)]
    deployment.ask(1, prompt(9, 18), max_tokens=3)
    steps = [planned(deployment.step()) for _ in range(4)]
    assert steps == [
        [(0, 3, 1), (1, 0, 8)],
        [(0, 4, 1), (1, 8, 8)],
        [(0, 5, 1), (1, 16, 2)],
        [(0, 6, 1), (1, 18, 1)],
    ]
    deployment.pump()
    deployment.check_texts()


def test_a_started_prompt_goes_on_before_new_ones_start() -> None:
    deployment = Deployment(page_size=4, pages_total=30, step_tokens=8)
    deployment.ask(0, prompt(0, 14))
    deployment.ask(1, prompt(20, 5))
    assert planned(deployment.step()) == [(0, 0, 8)]
    assert planned(deployment.step()) == [(0, 8, 6)]  # the 2 rows left hold no page of the next
    assert planned(deployment.step()) == [(0, 14, 1), (1, 0, 5)]


def test_a_full_batch_of_decodes_leaves_room_for_a_chunk() -> None:
    deployment = Deployment(page_size=4, pages_total=60, step_tokens=6, running_max=50)
    for seq in range(5):
        deployment.ask(seq, prompt(seq * 7, 5), max_tokens=30)
    for _ in range(12):
        deployment.step()
    assert deployment.planner.statistics().running == 3  # 6 rows less a page, and one
    assert len(planned(deployment.step())) == 3
    deployment.pump()
    deployment.check_texts()


def test_the_cache_gives_whole_pages_and_leaves_a_token_to_compute() -> None:
    deployment = Deployment(page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 8))
    deployment.pump()
    deployment.ask(1, prompt(0, 8))
    assert planned(deployment.step()) == [(1, 4, 4)]
    deployment.pump()
    deployment.ask(2, prompt(0, 9))
    assert planned(deployment.step()) == [(2, 8, 1)]
    deployment.pump()
    assert [deployment.ends[seq].cached_len for seq in range(3)] == [0, 4, 8]
    deployment.check_texts()
    deployment.check_idle()


def test_generated_tokens_are_cached_too() -> None:
    deployment = Deployment(page_size=4, pages_total=30)
    deployment.ask(0, prompt(0, 6), max_tokens=11)
    deployment.pump()
    deployment.ask(1, [*prompt(0, 6), *deployment.texts[0], 1, 2])
    assert planned(deployment.step()) == [(1, 16, 3)]


def test_requests_with_the_same_prefix_compute_it_once() -> None:
    deployment = Deployment(page_size=4, pages_total=60, step_tokens=16)
    for seq in range(4):
        deployment.ask(seq, prompt(0, 20), seed=seq)
    deployment.ask(4, prompt(30, 3))  # shares nothing, so it need not wait
    assert planned(deployment.step()) == [(0, 0, 16)]
    assert planned(deployment.step()) == [(0, 16, 4), (1, 16, 4), (2, 16, 4), (3, 16, 4)]
    deployment.pump()
    assert deployment.planner.statistics().rows == 16 + 4 * 4 + 3 + 5 * 3
    deployment.check_texts()
    deployment.check_idle()


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    deployment = Deployment(page_size=4, pages_total=60, step_tokens=16)
    deployment.ask(0, prompt(0, 9))
    deployment.ask(1, prompt(0, 9), seed=1)
    deployment.ask(2, prompt(30, 3))
    assert planned(deployment.step()) == [(0, 0, 9), (2, 0, 3)]
    assert planned(deployment.step()) == [(0, 9, 1), (2, 3, 1), (1, 8, 1)]


def test_who_waited_for_an_aborted_prefill_computes_the_prefix_itself() -> None:
    deployment = Deployment(page_size=4, pages_total=60, step_tokens=8)
    deployment.ask(0, prompt(0, 40))
    deployment.ask(1, prompt(0, 40), seed=1)
    deployment.step()
    deployment.plan_one()
    deployment.finish(0)
    deployment.report_one()
    assert planned(deployment.step()) == [(1, 16, 8)]  # both chunks are in the cache
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_a_prefix_is_shared_while_its_prompt_is_still_computed() -> None:
    deployment = Deployment(page_size=4, pages_total=60, step_tokens=8)
    deployment.ask(0, prompt(0, 24))
    deployment.ask(1, [*prompt(0, 8), 39, 39])
    assert planned(deployment.step()) == [(0, 0, 8)]
    deployment.step()
    deployment.pump()
    assert deployment.ends[1].cached_len == 8
    deployment.check_texts()


def test_salts_never_share_a_page() -> None:
    deployment = Deployment(page_size=4, pages_total=60)
    for seq, salt in enumerate(("", "a", "b")):
        deployment.ask(seq, prompt(0, 12), salt=salt, max_tokens=8)
    deployment.pump()
    assert [deployment.ends[seq].cached_len for seq in range(3)] == [0, 0, 0]
    tables = [
        {page for plan in deployment.plans for batch in plan.batches for rows in batch.rows
         if rows.seq == seq for page in rows.pages}
        for seq in range(3)
    ]  # fmt: skip
    assert all(len(table) == 5 for table in tables)
    assert len(set.union(*tables)) == 15
    deployment.ask(3, prompt(0, 12), salt="b")
    deployment.pump()
    assert deployment.ends[3].cached_len == 8
    deployment.check_texts()


def test_prompt_logprobs_compute_every_prompt_row() -> None:
    deployment = Deployment(page_size=4, pages_total=60)
    deployment.ask(0, prompt(0, 12))
    deployment.pump()
    deployment.ask(1, prompt(0, 12), prompt_logprobs=0)
    assert planned(deployment.step()) == [(1, 0, 12)]
    entries = deployment.outputs[-1].prompt_logprobs
    assert [entry.token for entry in entries] == prompt(0, 12)[1:]
    deployment.pump()
    assert deployment.ends[1].cached_len == 0
    deployment.check_texts()
    deployment.check_idle()


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    deployment = Deployment(page_size=4, pages_total=60, prefix_cache=False)
    deployment.ask(0, prompt(0, 12))
    deployment.ask(1, prompt(0, 12))
    assert planned(deployment.step()) == [(0, 0, 12), (1, 0, 4)]
    deployment.pump()
    statistics = deployment.planner.statistics()
    assert statistics.kv_pages_free == 60
    assert statistics.prefix_hit_tokens == 0
    deployment.check_texts()


def test_lower_priority_numbers_go_first_and_equals_in_order() -> None:
    deployment = Deployment(page_size=4, pages_total=60, running_max=1)
    for seq, priority in enumerate((1, 0, 1, -3, 0)):
        deployment.ask(seq, prompt(seq * 5, 3), priority=priority)
    deployment.pump()
    assert list(deployment.ends) == [3, 1, 4, 0, 2]


def test_admission_leaves_room_for_what_running_sequences_will_need() -> None:
    # 20 pages of 4. Each wants 8 + 40 tokens, at the starting ratio of 0.7: 8 + 28 - 1, 9 pages.
    deployment = Deployment(page_size=4, pages_total=20, step_tokens=64)
    for seq in range(3):
        deployment.ask(seq, prompt(seq * 9, 8), max_tokens=40)
    assert [seq for seq, _, _ in planned(deployment.step())] == [0, 1]
    assert deployment.planner.statistics().waiting == 1
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_a_lone_sequence_may_use_the_whole_pool() -> None:
    deployment = Deployment(page_size=4, pages_total=5)
    assert deployment.planner.request_len_max == 21
    deployment.ask(0, prompt(0, 8), max_tokens=13, prompt_logprobs=0)
    deployment.pump()
    deployment.ask(1, prompt(0, 8), max_tokens=13)
    deployment.pump()
    assert deployment.planner.statistics().retractions == 0
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "status", "numbers"),
    [
        (0, 4, 400, "empty"),
        (3, 0, 400, "max_tokens is 0"),
        (90, 11, 400, "the context is 100 tokens; 90 in the prompt and 11 to generate are 101"),
        (100, 1, 400, "the context is 100 tokens"),
        (50, 32, 413, "holds 80 tokens of one request; 50 in the prompt and 32 to generate"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    prompt_len: int, max_tokens: int, status: int, numbers: str
) -> None:
    deployment = Deployment(page_size=4, pages_total=20, context_len=100)
    with pytest.raises(RequestError, match=numbers) as caught:
        deployment.ask(0, prompt(0, prompt_len), max_tokens=max_tokens)
    assert caught.value.status == status
    deployment.ask(1, prompt(0, 50), max_tokens=31)
    deployment.pump()
    deployment.check_texts()


def test_a_full_queue_answers_429_until_it_has_room() -> None:
    deployment = Deployment(page_size=4, pages_total=20, waiting_max=2)
    deployment.ask(0, prompt(0, 3))
    deployment.ask(1, prompt(0, 3))
    assert deployment.planner.waiting_free == 0
    with pytest.raises(RequestError, match="2 sequences are waiting, at most 2 may") as caught:
        deployment.ask(2, prompt(0, 3))
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    deployment.step()
    deployment.ask(2, prompt(0, 3))
    deployment.pump()
    deployment.check_texts()


def test_nothing_to_do_is_no_plan() -> None:
    deployment = Deployment()
    assert deployment.plan_one() is None
    deployment.ask(0, prompt(0, 3), max_tokens=1)
    assert deployment.plan_one() is not None
    assert deployment.plan_one() is None  # one unanswered plan is the limit
    deployment.report_one()
    assert deployment.plan_one() is None


def test_every_group_has_its_batch_even_an_empty_one() -> None:
    deployment = Deployment(groups=3, step_tokens=48)
    deployment.ask(0, prompt(0, 3))
    deployment.ask(1, prompt(9, 3))
    plan = deployment.step()
    assert plan is not None
    assert [[rows.seq for rows in batch.rows] for batch in plan.batches] == [[0], [1], []]
    deployment.pump()
    deployment.check_texts()


def test_microbatches_take_turns_and_fill_evenly() -> None:
    deployment = Deployment(in_flight_max=2, running_max=8)
    for seq in range(4):
        deployment.ask(seq, prompt(seq * 5, 3), max_tokens=5)
    first, second = deployment.plan_one(), deployment.plan_one()
    assert [seq for seq, _, _ in planned(first)] == [0, 1]
    assert [seq for seq, _, _ in planned(second)] == [2, 3]
    assert deployment.plan_one() is None
    deployment.report_one()
    third = deployment.plan_one()
    assert third is not None
    assert third.microbatch == 0
    assert [commit.seq for commit in third.commits] == [0, 1]
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_a_flush_frees_what_nobody_uses_and_says_whether_that_was_all() -> None:
    deployment = Deployment(page_size=4, pages_total=20)
    deployment.ask(0, prompt(0, 12))
    deployment.pump()
    deployment.ask(1, prompt(20, 12))
    deployment.step()
    assert not deployment.planner.flush_cache()
    deployment.pump()
    assert deployment.planner.flush_cache()
    deployment.ask(2, prompt(0, 12))
    deployment.pump()
    assert deployment.ends[2].cached_len == 0
    deployment.check_texts()


def test_statistics_count_pages_by_what_holds_them() -> None:
    deployment = Deployment(page_size=4, pages_total=20)
    deployment.ask(0, prompt(0, 12), max_tokens=2)
    deployment.step()
    statistics = deployment.planner.statistics()
    assert (statistics.running, statistics.waiting) == (1, 0)
    assert (statistics.kv_pages_used, statistics.kv_pages_free) == (3, 17)
    deployment.pump()
    statistics = deployment.planner.statistics()
    assert (statistics.kv_pages_used, statistics.kv_pages_cached) == (0, 3)
    assert (statistics.steps, statistics.rows, statistics.requests) == (2, 13, 1)


def test_unused_prefixes_make_room_before_more_memory_is_taken() -> None:
    deployment = Deployment(page_size=4, pages_total=100, pages_kept=10)
    for seq in range(8):
        deployment.ask(seq, prompt(seq * 5, 12), salt=str(seq))
        deployment.pump()
        statistics = deployment.planner.statistics()
        assert min(7, 3 * (seq + 1)) <= statistics.kv_pages_cached <= 10
    deployment.ask(8, prompt(7 * 5, 12), salt="7")  # the last is still there
    deployment.pump()
    assert deployment.ends[8].cached_len == 8
    deployment.check_texts()


def test_a_busy_pool_may_keep_a_share_of_itself_for_nobody() -> None:
    deployment = Deployment(page_size=4, pages_total=200, pages_kept=0, running_max=4)
    for seq in range(3):
        deployment.ask(seq, prompt(seq, 80), max_tokens=150, salt=str(seq))
    idle: list[int] = []
    for seq in range(3, 12):
        deployment.ask(seq, prompt(seq, 9), max_tokens=1, salt=str(seq))
        while seq not in deployment.ends:
            deployment.step()
        statistics = deployment.planner.statistics()
        idle.append(statistics.kv_pages_cached)
        n_used = statistics.kv_pages_used + statistics.kv_pages_cached
        assert (idle[-1] - 2) * IDLE_SHARE <= n_used  # two came when the last one left
    assert idle[-1] > 2  # so the share counts
    deployment.pump()
    deployment.check_texts()
