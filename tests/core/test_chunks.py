"""Chunk lengths: the fit, the golden table, the pipeline they are for, a planner that uses them.

The golden table was computed apart from the code, from the published formulas in decimal arithmetic
of 60 digits. One row by hand: a = 1/4, b = 0, base 1024, history 30000: x = sqrt(30000^2 + 1024^2)
- 30000 = 17.47; 1024 + 0.75 * (17.47 - 1024) = 269.1; down to a multiple of 64, 256.
"""

import math

import pytest

from aserve.core.chunk import (
    Bounds,
    Cost,
    best_base,
    dynamic_chunks,
    fit,
    fixed_chunks,
    pipeline_times,
    predict,
    slope,
)
from aserve.core.config import Layout
from aserve.core.message import StepPlan
from aserve.core.sizer import profile_lengths
from tests.core.deployment import Deployment

# a, b, base, history, page size, context, rows of a step at most, the chunk
GOLDEN = [
    (0.05, 340, 4096, 0, 16, 131072, 4096, 4096),
    (0.05, 340, 4096, 512, 16, 131072, 4096, 3840),
    (0.05, 340, 4096, 4096, 16, 131072, 4096, 2880),
    (0.05, 340, 4096, 30000, 16, 131072, 4096, 1472),
    (0.05, 340, 4096, 120000, 16, 131072, 4096, 1152),
    (0.01, 20, 512, 0, 16, 131072, 512, 512),
    (0.01, 20, 512, 512, 16, 131072, 512, 384),
    (0.01, 20, 512, 4096, 16, 131072, 512, 192),
    (0.01, 20, 512, 30000, 16, 131072, 512, 128),
    (0.01, 20, 512, 120000, 16, 131072, 512, 128),
    (0.25, 0, 1024, 0, 16, 131072, 1024, 1024),
    (0.25, 0, 1024, 512, 16, 131072, 1024, 704),
    (0.25, 0, 1024, 4096, 16, 131072, 1024, 320),
    (0.25, 0, 1024, 30000, 16, 131072, 1024, 256),
    (0.001, 60, 2048, 0, 16, 131072, 2048, 2048),
    (0.001, 60, 2048, 512, 16, 131072, 2048, 1984),
    (0.001, 60, 2048, 4096, 16, 131072, 2048, 1856),
    (0.001, 60, 2048, 30000, 16, 131072, 2048, 1280),
    (0.001, 60, 2048, 120000, 16, 131072, 2048, 768),
    (0.05, 340, 512, 1000, 128, 131072, 512, 384),  # whole large pages
    (0.05, 340, 512, 1000, 16, 1200, 512, 64),  # near the end of the context
    (0.05, 340, 512, 1000, 16, 1163, 512, None),
    (0.05, 340, 96, 1000, 16, 131072, 96, 64),
    (0.05, 340, 48, 0, 16, 131072, 48, None),  # no step holds an alignment
    (0.01, 20, 512, 2000, 16, 131072, 200, 192),  # bounded by the rows of a step
    (0.01, 20, 200, 8000, 16, 131072, 200, 64),
]


@pytest.mark.parametrize(("a", "b", "base", "history", "page", "context", "most", "rows"), GOLDEN)
def test_chunks_are_those_of_the_golden_table(
    a: float, b: float, base: int, history: int, page: int, context: int, most: int, rows: int
) -> None:
    assert predict(Cost(a, b, 900.0, 2 * a), base, history, Bounds(page, context, most)) == rows


@pytest.mark.parametrize("base", range(64, 1024, 64))
def test_the_first_chunk_is_the_base_itself(base: int) -> None:
    assert predict(Cost(0.0123, 17.1, 5.0, 0.0246), base, 0, Bounds(16, 100000, base)) == base


def curve(a: int, b: int, c: int, lengths: range) -> list[tuple[int, int]]:
    return [(rows, a * rows * rows + b * rows + c) for rows in lengths]


def test_a_fit_goes_through_points_of_a_curve_and_ignores_the_cold_first_one() -> None:
    samples = [(640, 10**9), *curve(3, 50, 700, range(600, 0, -40))]
    assert fit(samples) == Cost(3.0, 50.0, 700.0, 6.0)


def test_a_fit_through_noise_is_the_least_squares_one() -> None:
    # By hand: l = 1..8 twice and one cold sample; noise +1, -1 at each length cancels exactly.
    exact = curve(2, 5, 9, range(1, 9))
    noisy = [(rows, micros + sign) for rows, micros in exact for sign in (1, -1)]
    assert fit([(9, 0), *noisy]) == Cost(2.0, 5.0, 9.0, 4.0)


def test_a_falling_linear_part_counts_as_none() -> None:
    cost = fit([(99, 1), *curve(3, -20, 9000, range(10, 100, 10))])
    assert isinstance(cost, Cost)
    assert (cost.a, cost.b) == (3.0, 0.0)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (curve(3, 5, 7, range(8)), "7 samples of step times, a fit needs 8"),
        ([(5, 1)] * 20, "fewer than 3 lengths"),
        (curve(0, 5, 7, range(20)), "do not grow faster than prompts"),
        (curve(-1, 500, 7, range(20)), "do not grow faster than prompts"),
    ],
)
def test_where_there_is_no_fit_the_reason_is_said(
    samples: list[tuple[int, int]], words: str
) -> None:
    reason = fit(samples)
    assert isinstance(reason, str)
    assert words in reason


def test_a_profile_has_128_descending_lengths_within_pool_and_context() -> None:
    lengths = profile_lengths(512, 100000, 100000)
    assert lengths[:3] == [640, 635, 630]
    assert (len(lengths), lengths[-1]) == (128, 5)
    assert profile_lengths(512, 300, 100000)[:2] == [300, 298]
    assert profile_lengths(512, 1000, 128)[0] == 128
    assert profile_lengths(8, 1000, 1000) == list(range(10, 0, -1))


def test_stages_wait_for_chunks_that_grow_and_not_for_equal_ones() -> None:
    assert pipeline_times(lambda history, rows: 2.0, [5, 5, 5], 4) == (12.0, (0.0,) * 4)
    # Times 1, 2, 3 on two stages: the second runs 1-2, 3-5 and 6-9, and waits 2 of 8.
    growing = pipeline_times(lambda history, rows: 1.0 + history, [1, 1, 1], 2)
    assert growing == (9.0, (0.0, 0.25))


def test_a_pipeline_of_one_stage_never_waits() -> None:
    assert pipeline_times(lambda history, rows: 1.0 + history, [1, 1, 1], 1) == (6.0, (0.0,))


# A small dense model on a CPU, and one whose attention is cheaper: microseconds of a stage.
CURVES = [Cost(0.043, 340, 300, 0.086), Cost(0.005, 60, 1000, 0.01), Cost(0.001, 60, 2000, 0.002)]


@pytest.mark.parametrize("cost", CURVES)
def test_chunks_of_equal_time_keep_eight_stages_busy_and_answer_sooner(cost: Cost) -> None:
    prompt_len, pp, bounds = 65536, 8, Bounds(16, 131072, 2048)
    fixed, _ = pipeline_times(cost.micros, fixed_chunks(2048, 0, prompt_len), pp)
    base = best_base(cost, pp, 0, prompt_len, bounds)
    chunks = dynamic_chunks(cost, base, 0, prompt_len, bounds)
    assert sum(chunks) == prompt_len
    assert max(chunks) <= 2048
    ttft, waits = pipeline_times(cost.micros, chunks, pp)
    assert max(waits) < 0.10
    assert ttft < 0.85 * fixed


def test_a_prompt_of_one_chunk_is_cut_for_the_pipe_unless_steps_are_dear() -> None:
    bounds = Bounds(16, 131072, 512)
    assert best_base(Cost(0.01, 100, 10, 0.02), 4, 0, 512, bounds) < 512
    assert best_base(Cost(0.01, 100, 10**6, 0.02), 4, 0, 512, bounds) == 512


def test_history_is_weighed_apart_from_the_speed_of_the_machine() -> None:
    cost = Cost(1.0, 10.0, 100.0, 2.0)
    samples = []
    for history in range(0, 4000, 500):
        alone = cost.variable(0, 64) + cost.c
        samples.append((alone, 64.0 * history, 3 * (alone + 5.0 * 64 * history)))
    found = slope(cost, samples)
    assert found is not None
    assert math.isclose(found, 5.0)
    assert slope(cost, samples[:1] * 9) is None  # one point tells nothing of two
    steep = [(u, v, y * 10) for u, v, y in samples[4:5]] + samples[:1]
    assert slope(cost, steep) == 8.0  # bounded


def prompt(first: int, length: int) -> list[int]:
    return [(first + at * at) % 40 for at in range(length)]


def timed(a: float, b: float, c: float, d: float):  # type: ignore[no-untyped-def]
    """What a first stage of this cost reports."""

    def micros(plan: StepPlan) -> int:
        rows = [(one.start, len(one.tokens)) for one in plan.batches[0].rows]
        return round(c + sum(a * n * n + d * history * n + b * n for history, n in rows))

    return micros


def pipelined(cost: tuple[float, float, float, float], **more: object) -> Deployment:
    settings = {
        "page_size": 16,
        "pages_total": 400,
        "layout": Layout(pp=3),
        "context_len": 8192,
        "step_tokens": 512,
        "dynamic_chunks": True,
        **more,
    }
    deployment = Deployment(**settings)
    deployment.micros = timed(*cost)
    return deployment


COST = (0.2, 30.0, 1000.0, 0.4)


def profile(deployment: Deployment) -> None:
    while deployment.planner.profiling:
        assert deployment.plan_one() is not None
        assert deployment.plan_one() is None  # one at a time
        deployment.report_one()


def test_the_first_plans_are_a_profile_that_leaves_nothing_behind() -> None:
    deployment = pipelined(COST)
    deployment.ask(0, prompt(0, 100))  # waits
    profile(deployment)
    plans = deployment.plans
    assert [len(plan.admits) for plan in plans] == [1] * 128
    lengths = [len(plan.batches[0].rows[0].tokens) for plan in plans]
    assert lengths == profile_lengths(512, 8192, 6400)
    assert not any(plan.batches[0].rows[0].sample for plan in plans)
    assert plans[1].drops == (plans[0].admits[0].seq,)
    assert all(token < 40 for plan in plans for token in plan.admits[0].tokens)
    statistics = deployment.planner.statistics()
    assert (statistics.rows, statistics.kv_pages_free, statistics.waiting) == (0, 400, 1)
    assert deployment.planner.state().chunks.startswith("dynamic: 0.2 n^2 + 0.4 h n + 30 n")
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def chunk_lengths(deployment: Deployment, seq: int) -> list[int]:
    return [
        len(rows.tokens)
        for plan in deployment.plans
        for batch in plan.batches
        for rows in batch.rows
        if rows.seq == seq and rows.start < len(deployment.requests[seq].tokens)
    ]


def test_chunks_of_a_long_prompt_shrink_and_fill_the_pipe() -> None:
    deployment = pipelined(COST)
    profile(deployment)
    deployment.ask(0, prompt(0, 5000))
    plans = [deployment.plan_one() for _ in range(3)]
    assert all(plan is not None for plan in plans)
    assert deployment.plan_one() is None
    deployment.pump()
    cost, bounds = Cost(*COST), Bounds(16, 8192, 512)
    base = best_base(cost, 3, 0, 5000, bounds)
    assert chunk_lengths(deployment, 0) == dynamic_chunks(cost, base, 0, 5000, bounds)
    deployment.check_texts()
    deployment.check_idle()


def test_the_first_chunk_after_a_cache_hit_is_sized_by_the_hit() -> None:
    deployment = pipelined(COST, pages_total=500)
    profile(deployment)
    deployment.ask(0, prompt(0, 5000), max_tokens=1)
    deployment.pump()
    deployment.ask(1, [*prompt(0, 5000), *prompt(3, 600)])
    deployment.pump()
    hit = deployment.ends[1].cached_len
    assert hit > 4900
    cost, bounds = Cost(*COST), Bounds(16, 8192, 512)
    base = best_base(cost, 3, hit, 5600, bounds)
    assert chunk_lengths(deployment, 1) == dynamic_chunks(cost, base, hit, 5600, bounds)
    assert chunk_lengths(deployment, 1)[0] < 512
    deployment.check_texts()


def test_a_step_holds_chunks_of_several_prompts_up_to_the_time_of_a_full_one() -> None:
    deployment = pipelined(COST)
    profile(deployment)
    for seq in range(3):
        deployment.ask(seq, prompt(seq, 2000))
    deployment.pump()
    cost = Cost(*COST)
    spans = []
    for plan in deployment.plans[128:]:
        rows = plan.batches[0].rows
        spans.append(sum(cost.variable(one.start, len(one.tokens)) for one in rows))
        assert sum(len(one.tokens) for one in rows) <= 512
    assert max(spans) <= 1.5 * cost.variable(0, 512)  # smoothing stops short of equal time
    assert any(len(plan.batches[0].rows) > 1 for plan in deployment.plans[128:])
    deployment.check_texts()


def test_where_step_times_do_not_grow_chunks_stay_fixed_with_a_warning() -> None:
    deployment = pipelined((0.0, 30.0, 1000.0, 0.0))
    profile(deployment)
    assert "dynamic chunks are off" in deployment.planner.statistics().chunks_warning
    assert deployment.planner.state().chunks == "fixed"
    deployment.ask(0, prompt(0, 1200))
    deployment.pump()
    assert chunk_lengths(deployment, 0) == [512, 512, 176]
    deployment.check_texts()


@pytest.mark.parametrize("more", [{"layout": Layout()}, {"dynamic_chunks": False}])
def test_without_a_pipeline_or_the_wish_there_is_no_profile(more: dict[str, object]) -> None:
    deployment = pipelined(COST, **more)
    assert deployment.plan_one() is None
    assert deployment.planner.statistics().chunks_warning == ""


def test_what_serving_shows_of_history_corrects_the_chunks() -> None:
    deployment = pipelined(COST, prefix_cache=False)
    profile(deployment)
    slower = tuple(3 * value for value in (0.2, 30.0, 1000.0, 1.2))  # and thrice as steep
    deployment.micros = timed(*slower)
    for seq in range(6):
        deployment.ask(seq, prompt(seq, 5000), max_tokens=1)
    deployment.pump()
    first, last = chunk_lengths(deployment, 0), chunk_lengths(deployment, 5)
    assert len(last) > len(first)
    assert "1.2 h n" in deployment.planner.state().chunks
    deployment.check_texts()


def test_new_ranks_take_up_an_unfinished_profile_and_do_not_repeat_a_finished_one() -> None:
    deployment = pipelined(COST)
    for _ in range(40):
        deployment.step()
    deployment.plan_one()
    deployment.reset()
    profile(deployment)
    assert len(deployment.all_plans) == 129
    deployment.reset()
    assert not deployment.planner.profiling
    deployment.ask(0, prompt(0, 3000))
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_every_group_sees_the_profile_of_the_first() -> None:
    deployment = pipelined(COST, layout=Layout(pp=2, tp=2, dp=2), step_tokens=1024)
    profile(deployment)
    assert all(len(plan.batches) == 2 and not plan.batches[1].rows for plan in deployment.plans)
    for seq in range(4):
        deployment.ask(seq, prompt(seq, 1500))
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()
