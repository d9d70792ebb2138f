"""When pages run out: who goes, where to, and how it comes back."""

import pytest

from aserve.core.admission import NewTokenRatio, victim
from aserve.core.message import Sampling
from aserve.core.request import Request
from aserve.core.sequence import Phase, Sequence
from tests.core.deployment import Deployment, oracle


def prompt(first: int, length: int) -> list[int]:
    return [(first + at) % 40 for at in range(length)]


def crowded(**schedule: int | bool) -> Deployment:
    """Two sequences are admitted that cannot both finish: 12 pages of 2, 16 tokens each."""
    deployment = Deployment(page_size=2, pages_total=12, step_tokens=16, **schedule)
    deployment.planner._composer.ratio.value = 1 << 17  # an eighth: admission is optimistic
    deployment.ask(0, prompt(0, 4), max_tokens=13)
    deployment.ask(1, prompt(20, 4), max_tokens=13)
    return deployment


def run_until_retraction(deployment: Deployment) -> None:
    for _ in range(50):
        deployment.step()
        if deployment.planner.statistics().retractions:
            return
    raise AssertionError("nobody was retracted")


def test_a_retracted_sequence_resumes_with_the_very_text() -> None:
    deployment = crowded()
    run_until_retraction(deployment)
    assert deployment.planner.statistics().running == 1
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_the_ranks_drop_it_and_get_all_its_tokens_back() -> None:
    deployment = crowded()
    run_until_retraction(deployment)
    plan = deployment.plans[-1]
    assert plan.drops == (1,)  # fewest outputs are equal, longest input too: the younger
    n_known = 4 + len(deployment.texts[1])
    assert 1 in [commit.seq for commit in plan.commits]
    deployment.pump()
    admit = next(a for p in deployment.plans[plan.step + 1 :] for a in p.admits if a.seq == 1)
    assert admit.tokens == (*prompt(20, 4), *deployment.texts[1][: n_known - 4])
    assert admit.prompt_len == 4
    assert 0 < admit.kv_len < n_known  # some of its pages were still in the cache


def test_it_waits_at_the_head_of_its_class() -> None:
    deployment = crowded(running_max=2)
    deployment.step()
    deployment.ask(2, prompt(30, 3), max_tokens=2)
    deployment.ask(3, prompt(35, 3), max_tokens=2, priority=-1)
    deployment.ask(4, prompt(38, 3), max_tokens=2, priority=-1)
    run_until_retraction(deployment)
    waiting = [sequence.seq for sequence in deployment.planner._composer.queue]
    retracted = deployment.plans[-1].drops[-1]
    assert waiting.index(retracted) < waiting.index(2)
    deployment.pump()
    deployment.check_texts()


def test_the_lowest_class_goes_first_then_fewest_outputs_then_longest_input() -> None:
    def sequence(seq: int, priority: int, n_generated: int, prompt_len: int) -> Sequence:
        request = Request(seq, (1,) * prompt_len, 100, Sampling(), priority)
        made = Sequence(request, order=seq)
        made.tokens += [2] * n_generated
        return made

    candidates = [
        sequence(0, 0, 0, 50),
        sequence(1, 1, 9, 9),
        sequence(2, 1, 3, 5),
        sequence(3, 1, 3, 6),
        sequence(4, 1, 3, 6),
    ]
    order = []
    while candidates:
        chosen = victim(candidates)
        candidates.remove(chosen)
        order.append(chosen.seq)
    assert order == [4, 3, 2, 1, 0]


def test_a_higher_class_keeps_its_pages() -> None:
    deployment = Deployment(page_size=2, pages_total=12, step_tokens=16)
    deployment.planner._composer.ratio.value = 1 << 17
    deployment.ask(0, prompt(0, 4), max_tokens=13, priority=5)
    deployment.ask(1, prompt(20, 8), max_tokens=13)  # younger and longer, but of a higher class
    run_until_retraction(deployment)
    assert deployment.plans[-1].drops == (0,)
    deployment.pump()
    deployment.check_texts()


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_twice() -> None:
    deployment = Deployment(page_size=2, pages_total=22, step_tokens=4)
    deployment.planner._composer.ratio.value = 1 << 17
    deployment.ask(0, prompt(0, 3), max_tokens=30)
    deployment.step()
    deployment.ask(1, prompt(5, 30), max_tokens=3, prompt_logprobs=0, logprobs=0, priority=1)
    run_until_retraction(deployment)
    assert not deployment.texts[1]  # in the middle of its prefill
    deployment.pump()
    outputs = [output for output in deployment.outputs if output.seq == 1]
    tokens = [entry.token for output in outputs for entry in output.prompt_logprobs]
    assert tokens == prompt(5, 30)[1:]
    deployment.check_texts()


@pytest.mark.parametrize("in_flight_max", [1, 2, 3])
def test_a_pool_for_one_serves_many(in_flight_max: int) -> None:
    deployment = Deployment(page_size=2, pages_total=9, step_tokens=8, in_flight_max=in_flight_max)
    for seq in range(12):
        deployment.planner._composer.ratio.value = 1 << 17
        deployment.ask(seq, prompt(seq * 3, 5), max_tokens=14)
    deployment.pump()
    assert deployment.planner.statistics().retractions > 0
    deployment.check_texts()
    deployment.check_idle()


def test_the_ratio_falls_with_decoding_rises_with_retraction_and_resets_when_idle() -> None:
    ratio = NewTokenRatio()
    start = ratio.value
    for _ in range(300):
        ratio.decode()
    assert start * 0.14 < ratio.value < start
    for _ in range(1000):
        ratio.decode()
    least = ratio.value
    assert abs(least / start - 0.14) < 0.001
    sequence = Sequence(Request(0, (1, 2), 100, Sampling()), order=0)
    sequence.tokens += [3] * 30
    ratio.retract([sequence])
    assert abs(ratio.value / (1 << 20) - (30 + 20) / 101) < 1e-5
    ratio.idle()
    assert ratio.value == start


def test_resumption_meets_a_stop_id_like_the_first_run_would() -> None:
    request = Request(1, tuple(prompt(20, 4)), 13, Sampling(seed=7))
    stop = oracle(request)[11]
    deployment = Deployment(page_size=2, pages_total=12, step_tokens=16)
    deployment.planner._composer.ratio.value = 1 << 17
    deployment.ask(0, prompt(0, 4), max_tokens=13)
    deployment.ask(1, prompt(20, 4), max_tokens=13, stop_ids=(stop,), min_tokens=10)
    run_until_retraction(deployment)
    deployment.pump()
    assert deployment.ends[1].finish_reason == "stop"
    assert deployment.ends[1].stop_token == stop
    deployment.check_texts()


def test_phases_move_by_the_table_only() -> None:
    sequence = Sequence(Request(0, (1, 2), 4, Sampling()), order=0)
    for phase in (Phase.LEAVING_KV, Phase.WAITING):
        with pytest.raises(AssertionError):
            sequence.enter(phase)
    for phase in (Phase.RUNNING, Phase.WAITING, Phase.RUNNING, Phase.FINISHED):
        sequence.enter(phase)
    for phase in Phase:
        with pytest.raises(AssertionError):
            sequence.enter(phase)
