"""Random loads on the planner, against an oracle that has never heard of pages."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.codec import decode_plan, encode
from aserve.core.config import Layout
from aserve.core.message import Sampling, StepPlan
from aserve.core.replica import Replica
from aserve.core.request import Request
from aserve.errors import RequestError
from tests.core.deployment import VOCAB, Deployment


def random_deployment(random: Random) -> Deployment:
    groups, page_size = random.choice([1, 1, 2, 3]), random.choice([1, 2, 4, 5])
    pp = random.choice([1, 1, 2, 3, 4])
    return Deployment(
        page_size=page_size,
        pages_total=random.randint(6, 30) if page_size > 1 else random.randint(20, 60),
        layout=Layout(pp=pp, dp=groups, tp=groups * random.choice([1, 1, 2])),
        in_flight_max=max(pp, random.choice([1, 1, 2, 3, 4])),
        draft_max=random.choice([0, 0, 1, 3, 8]),
        whims=random.choice([None, random]),
        bigrams=random.random() < 0.3,
        step_tokens=groups * page_size * random.randint(1, 6),
        running_max=random.randint(1, 12),
        waiting_max=random.choice([3, 1000]),
        prefix_cache=random.random() < 0.8,
    )


def random_request(random: Random, seq: int, len_max: int, prefixes: list[list[int]]) -> Request:
    tokens = list(random.choice(prefixes))[: random.randint(0, 30)]
    tokens += [random.randrange(VOCAB) for _ in range(random.randint(1, 8))]
    tokens = tokens[: len_max - 1]
    sampling = Sampling(
        seed=random.randrange(3),
        min_tokens=random.choice([0, 0, 5]),
        stop_ids=tuple(random.sample(range(VOCAB), random.choice([0, 1, 4]))),
        logprobs=random.choice([-1, 0]),
        prompt_logprobs=random.choice([-1, -1, 0]),
    )
    return Request(
        seq,
        tuple(tokens),
        random.randint(1, max(1, min(random.choice([6, 40]), len_max - len(tokens)))),
        sampling,
        random.choice([0, 0, -1, 1]),
        random.choice(["", "", "tenant"]),
    )


def offer(deployment: Deployment, request: Request) -> None:
    if deployment.planner.waiting_free:
        deployment.add(request)
        return
    with pytest.raises(RequestError) as caught:
        deployment.add(request)
    assert caught.value.status == 429


def run(random: Random) -> Deployment:
    deployment = random_deployment(random)
    prefixes = [[random.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
    if random.random() < 0.5:  # admit more than will fit
        deployment.planner._composer.ratio.value = 1 << 17
    reset_share = random.choice([0, 0, 0.03])
    seq = 0
    for _ in range(random.randint(5, 80)):
        event = random.random()
        if event < 0.35:
            len_max = deployment.planner.request_len_max
            request = random_request(random, seq, len_max, prefixes)
            for choice in range(random.choice([1, 1, 3])):
                offer(deployment, msgspec.structs.replace(request, seq=seq + choice))
            seq += 3
        elif event < 0.45 and seq:
            deployment.finish(random.randrange(seq), random.choice(["abort", "stop"]))
        elif event < 0.47:
            deployment.planner.flush_cache()
        elif event < 0.47 + reset_share:
            deployment.reset()
        elif event < 0.75 or not deployment.reports:
            deployment.plan_one()
        elif event < 0.85:
            deployment.report_one()
        else:
            for _ in range(deployment.grid.world):
                if deployment.reports:
                    deployment.report_rank(random)
    deployment.pump()
    return deployment


def check_log(deployment: Deployment) -> None:
    """The log alone brings a new replica to where the old one is."""
    replica = Replica(deployment.page_size)
    for plan in deployment.plans:
        replica.apply(decode_plan(encode(plan)))
    assert replica.digest == deployment.replica.digest


def check(deployment: Deployment) -> None:
    check_log(deployment)
    n_drawn = sum(len(text) for text in deployment.texts.values())
    assert deployment.planner.statistics().retractions <= n_drawn
    for seq, request in deployment.requests.items():
        outputs = [output for output in deployment.outputs if output.seq == seq]
        logprobs = [entry.token for output in outputs for entry in output.logprobs]
        assert logprobs == (deployment.texts[seq] if request.sampling.logprobs >= 0 else [])
        prompt = [entry.token for output in outputs for entry in output.prompt_logprobs]
        if request.sampling.prompt_logprobs >= 0 and deployment.texts[seq]:
            assert prompt == list(request.tokens[1:])
    deployment.check_texts()
    deployment.check_idle()


@pytest.mark.slow
@settings(max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_any_load_gives_the_oracles_text_and_leaves_nothing_behind(seed: int) -> None:
    check(run(Random(seed)))


def run_with_dynamic_chunks(random: Random) -> Deployment:
    """Long prompts through a pipe whose first stage is measured, and is not always as quick."""
    groups, page_size = random.choice([1, 2]), random.choice([8, 16, 24])
    deployment = Deployment(
        page_size=page_size,
        pages_total=random.choice([2400, 4000]) // page_size,
        layout=Layout(pp=random.choice([2, 3, 4]), dp=groups, tp=groups),
        draft_max=random.choice([0, 5]),
        step_tokens=groups * random.choice([64, 200, 512]),
        dynamic_chunks=True,
        context_len=4000,
    )
    a, b, c = random.choice([0.0, 0.1, 0.3]), random.randint(1, 40), random.randint(0, 2000)

    def micros(plan: StepPlan) -> int:
        rows = [(one.start, len(one.tokens)) for one in plan.batches[0].rows]
        exact = c + sum(((n + 2 * start) * a + b) * n for start, n in rows)
        return round(exact * random.uniform(0.9, 1.3))

    deployment.micros = micros
    for seq in range(random.randint(2, 12)):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, 1500))]
        deployment.ask(seq, prompt, random.randint(1, 9), priority=random.choice([0, 0, 1]))
        for _ in range(random.randint(0, 40)):
            if random.random() < 0.02:
                deployment.reset()
            if deployment.plan_one() is None and deployment.reports:
                deployment.report_rank(random)
    deployment.pump()
    return deployment


@pytest.mark.slow
def test_chunks_of_any_length_give_the_oracles_text() -> None:
    warnings = 0
    for seed in range(15):
        deployment = run_with_dynamic_chunks(Random(seed))
        check(deployment)
        warnings += bool(deployment.planner.statistics().chunks_warning)
    assert 0 < warnings < 15


def run_crowded(random: Random) -> Deployment:
    """A tiny pool, and admission that again and again forgets what running sequences will need."""
    groups, page_size = random.choice([1, 1, 2]), random.choice([1, 1, 2, 3])
    deployment = Deployment(
        page_size=page_size,
        pages_total=random.randint(12, 30),
        layout=Layout(pp=random.choice([1, 2, 3, 4]), dp=groups, tp=groups),
        overlap=random.choice([0, 1]),
        draft_max=random.choice([0, 2, 6]),
        step_tokens=groups * page_size * random.randint(1, 8),
        running_max=random.randint(2, 24),
        prefix_cache=random.random() < 0.5,
    )
    len_max = deployment.planner.request_len_max
    for seq in range(random.randint(4, 14)):
        prompt = [random.randrange(VOCAB) for _ in range(random.randint(1, min(8, len_max - 2)))]
        max_tokens = random.randint(1, len_max - len(prompt))
        deployment.ask(seq, prompt, max_tokens, priority=random.choice([0, 0, 1]))
    for _ in range(2000):
        if random.random() < 0.5:
            deployment.planner._composer.ratio.value = 1 << 16
        if random.random() < 0.7 and deployment.plan_one() is not None:
            continue
        if deployment.reports:
            deployment.report_rank(random)
    deployment.pump()
    return deployment


@pytest.mark.slow
def test_where_everybody_retracts_everybody_all_still_end() -> None:
    n_retractions = 0
    for seed in range(40):
        deployment = run_crowded(Random(seed))
        check(deployment)
        n_retractions += deployment.planner.statistics().retractions
    assert n_retractions > 100


@pytest.mark.slow
def test_the_loads_meet_retractions_cache_hits_and_full_queues() -> None:
    deployments = [run(Random(seed)) for seed in range(60)]
    statistics = [deployment.planner.statistics() for deployment in deployments]
    assert sum(one.retractions for one in statistics) > 3
    assert sum(one.prefix_hit_tokens for one in statistics) > 1000
    assert sum(one.requests for one in statistics) > 400
    plans = [plan for deployment in deployments for plan in deployment.all_plans]
    kept = [commit.path for plan in plans for commit in plan.commits if len(commit.tokens) > 1]
    assert len(kept) > 100
    assert sum(path != tuple(range(len(path))) for path in kept) > 50  # and moved


def test_a_run_repeats_bit_for_bit() -> None:
    first, second = run(Random(5)), run(Random(5))
    assert first.plans == second.plans
    assert first.replica.digest == second.replica.digest
    assert first.outputs == second.outputs
