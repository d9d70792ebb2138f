"""The sampler: each parameter against an independent source, the noise, log-probabilities."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aserve import _native
from aserve.core.message import NONE_LEFT, Sampling
from aserve.core.noise import draw_key, token_bits, uniform
from aserve.tensor.sampler import (
    NOT_A_NUMBER,
    Drawn,
    History,
    NativeSampler,
    Sampler,
    SampleRow,
    open_sampler,
)
from aserve.tensor.sampler_reference import filtered, gumbel_noise
from tests.tensor.draws import row, words

INF = math.inf


@pytest.fixture(params=["generic", "avx512"])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both sets of kernels, where the machine has both."""
    before = _native.level()
    if _native.set_level(request.param) != request.param:
        _native.set_level(before)
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    _native.set_level(before)


@pytest.fixture(params=["native", "reference"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return open_sampler(request.param)


def draw(sampler: Sampler, logits: list[float] | torch.Tensor, one: SampleRow) -> Drawn:
    [drawn] = sampler.sample(torch.as_tensor(logits, dtype=torch.float32)[None], [one])
    return drawn


def drawable(sampler: Sampler, logits: list[float], draws: int = 300, **parameters: object) -> set:
    """Tokens that turn up over many positions."""
    rows = [row(position=position, **parameters) for position in range(draws)]
    table = torch.tensor(logits, dtype=torch.float32).expand(draws, -1)
    return {drawn.token for drawn in sampler.sample(table, rows)}


# Noise.


def test_noise_is_that_of_core(level: str) -> None:
    vocab, key = 100, draw_key(11, 5)
    noise = gumbel_noise(key, vocab)
    for token in range(vocab):
        value = -math.log(-math.log(uniform(token_bits(key, token))))
        assert noise[token] == pytest.approx(value, abs=1e-12)
    [drawn] = NativeSampler().sample(torch.zeros(1, vocab), [row(seed=11, position=5)])
    assert drawn.token == noise.argmax()


def test_draws_follow_the_softmax(level: str) -> None:
    """Chi-square over 20000 positions of one seed, 9 degrees of freedom: 27.9 is p = 0.001."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, 3.0, -INF, 0.25])
    draws, temperature = 20_000, 0.8
    one = History(Sampling(seed=2024, temperature=temperature), [], 0)
    rows = [SampleRow(one, position) for position in range(draws)]
    drawn = NativeSampler().sample(logits.expand(draws, -1), rows)
    counts = Counter(each.token for each in drawn)
    wanted = torch.softmax(logits.double() / temperature, dim=0) * draws
    assert counts[9] == 0
    chi_square = sum((counts[i] - w) ** 2 / w for i, w in enumerate(wanted.tolist()) if w > 0)
    assert chi_square < 27.9


def test_seeds_and_positions_draw_independently() -> None:
    logits = torch.zeros(1, 2).expand(4000, 2)
    by_seed = [row(seed=seed, position=0) for seed in range(4000)]
    by_position = [row(seed=0, position=position) for position in range(4000)]
    sampler = NativeSampler()
    for rows in (by_seed, by_position):
        drawn = [each.token for each in sampler.sample(logits, rows)]
        assert 1850 < sum(drawn) < 2150  # 4.7 standard deviations
        repeats = sum(a == b for a, b in itertools.pairwise(drawn))
        assert 1850 < repeats < 2150


@pytest.mark.parametrize("threads", [1, 3])
def test_a_draw_does_not_depend_on_the_batch(level: str, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 700, generator=generator) * 2
    rows = [row([1, 2], 1, seed=n, top_p=0.9, logprobs=2, temperature=0.9) for n in range(9)]
    sampler = NativeSampler(_native.Team(threads))
    together = sampler.sample(logits, rows)
    alone = [sampler.sample(logits[n : n + 1], rows[n : n + 1])[0] for n in range(9)]
    backwards = sampler.sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


def test_rows_may_lie_apart_in_memory(sampler: Sampler) -> None:
    logits = torch.arange(60.0).reshape(3, 20)[:, :10]
    drawn = sampler.sample(logits, [row(temperature=0.0, logprobs=1) for _ in range(3)])
    assert [each.token for each in drawn] == [9, 9, 9]
    assert sampler.sample(torch.empty(0, 10), []) == []


# Each parameter.


def test_greedy_takes_the_lowest_of_equals(sampler: Sampler) -> None:
    assert draw(sampler, [1.0, 5.0, 5.0, 2.0], row(temperature=0.0)).token == 1


def test_penalties_have_openais_and_ctrls_values(sampler: Sampler) -> None:
    """Token 0 generated twice, 1 generated once, 2 in the prompt only, 3 new."""
    tokens = [2, 0, 1, 0]
    for parameters, wanted in [
        ({"frequency_penalty": 0.5}, [3 - 1.0, 3 - 0.5, 3, 3]),
        ({"presence_penalty": 0.5}, [3 - 0.5, 3 - 0.5, 3, 3]),
        ({"repetition_penalty": 2.0}, [1.5, 1.5, 1.5, 3]),
        ({"repetition_penalty": 2.0, "frequency_penalty": 1.0}, [-0.5, 0.5, 1.5, 3]),
    ]:
        for token, value in enumerate(wanted):
            # The token wins against a rival just below its penalised value and loses just above.
            for nudge, winner in ((-0.01, token), (0.01, 4)):
                logits = [-50.0] * 5
                logits[token] = 3.0
                logits[4] = value + nudge
                one = row(tokens, 1, temperature=0.0, **parameters)
                assert draw(sampler, logits, one).token == winner, (parameters, token)


def test_repetition_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    tokens = [3, 3, 7, 9, 20]
    for penalty in (0.5, 1.3, 4.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits.clone())
        one = row(tokens, 2, temperature=0.0, repetition_penalty=penalty)
        assert draw(sampler, logits[0], one).token == theirs.argmax().item()


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_k", 5), ("top_k", 49), ("top_p", 0.7), ("top_p", 0.05), ("min_p", 0.1)],
)
def test_filters_are_those_of_transformers(name: str, value: float) -> None:
    import transformers

    warper = {
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }[name](value)
    generator = torch.Generator().manual_seed(5)
    for temperature in (0.6, 1.0, 2.5):
        logits = torch.randn(1, 50, generator=generator) * 2
        theirs = warper(torch.tensor([[0]]), logits / temperature)[0] > -INF
        history = History(Sampling(temperature=temperature, **{name: value}), [], 0)
        ours = filtered(logits[0].double().numpy(), history) > -INF
        assert ours.tolist() == theirs.tolist()


def test_filters_apply_in_order_top_k_top_p_min_p(sampler: Sampler) -> None:
    """Of p = .4 .3 .2 .1: top_k 2 leaves .571 .429, of which top_p .5 needs one; without it two."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert drawable(sampler, logits, top_k=2) == {0, 1}
    assert drawable(sampler, logits, top_p=0.5) == {0, 1}
    assert drawable(sampler, logits, top_k=2, top_p=0.5) == {0}
    assert drawable(sampler, logits, min_p=0.45) == {0, 1, 2}
    assert drawable(sampler, logits, min_p=0.45, top_k=2) == {0, 1}
    # The filters see the scaled distribution: at temperature 3 it is flatter.
    assert drawable(sampler, logits, min_p=0.6, temperature=3.0) == {0, 1, 2, 3}


def test_top_k_keeps_equal_logits_together(sampler: Sampler) -> None:
    assert drawable(sampler, [3.0, 1.0, 3.0, 3.0], top_k=1) == {0, 2, 3}


def test_logit_bias_moves_and_bans(sampler: Sampler) -> None:
    one = row(temperature=0.0, logit_bias=((2, 5.0), (99, 7.0)))
    assert draw(sampler, [1.0, 4.0, 0.0], one).token == 2
    one = row(temperature=0.0, logit_bias=((1, -100.0),))
    assert draw(sampler, [1.0, 4.0, 0.0], one).token == 0


def test_bad_words_are_those_of_transformers(sampler: Sampler) -> None:
    from transformers import NoBadWordsLogitsProcessor

    words = [[4], [1, 2], [1, 2, 3], [9, 1, 5], [6, 6]]
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    for tokens in ([9, 1], [1, 2], [0, 1, 2], [6], [2], [9, 1, 2, 6]):
        logits = torch.zeros(1, 12)
        allowed = processor(torch.tensor([tokens]), logits)[0] > -INF
        bans = tuple(map(tuple, words))
        history = History(Sampling(bad_words=bans), tokens, 1)
        ours = set(range(12)) - set(history.banned().tolist())
        assert ours == {token for token in range(12) if allowed[token]}
        grown = History(Sampling(bad_words=bans), tokens[:1], 1)
        for token in tokens[1:]:
            grown.append(token)
        assert sorted(grown.banned()) == sorted(history.banned())
    one = row([1], 1, temperature=0.0, bad_words=((1, 2),))
    assert draw(sampler, [0.0, 1.0, 9.0], one).token == 1


def test_min_tokens_holds_back_stops_and_no_longer(sampler: Sampler) -> None:
    parameters = {"temperature": 0.0, "min_tokens": 2, "stop_ids": (2,)}
    logits = [0.0, 1.0, 9.0]
    assert draw(sampler, logits, row([5, 1], 1, **parameters)).token == 1
    assert draw(sampler, logits, row([5, 1, 1], 1, **parameters)).token == 2


def test_a_complete_grammar_wins_over_min_tokens(sampler: Sampler) -> None:
    one = row([5], 1, mask=words({2}, 40), min_tokens=3, stop_ids=(2,))
    assert draw(sampler, torch.zeros(40), one).token == 2


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(0, 60))
def test_history_kept_up_is_history_made_anew(tokens: list[int], prompt_len: int) -> None:
    prompt_len = min(prompt_len, len(tokens))
    sampling = Sampling(repetition_penalty=1.1, bad_words=((1, 2, 3),))
    kept = History(sampling, tokens[:prompt_len], prompt_len)
    for token in tokens[prompt_len:]:
        kept.append(token)
    counts = Counter(tokens[prompt_len:])
    for history in (kept, History(sampling, tokens, prompt_len)):
        ids, times = history.seen
        wanted = {token: counts[token] for token in tokens}
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == wanted
        assert history.generated_len == len(tokens) - prompt_len


# Masks and what cannot be drawn.


def test_only_masked_in_tokens_are_drawn(sampler: Sampler, level: str) -> None:
    rows = [row(mask=words({3, 64}, 70), position=n) for n in range(200)]
    drawn = sampler.sample(torch.zeros(200, 70), rows)
    assert {each.token for each in drawn} == {3, 64}


def test_nothing_left_and_not_a_number_end_their_row_only(sampler: Sampler, level: str) -> None:
    logits = torch.zeros(5, 40)
    logits[1, 39] = math.nan
    logits[2, 0] = INF
    logits[3] = -INF
    rows = [row(temperature=0.0, logprobs=0) for _ in range(4)] + [row(mask=words(set(), 40))]
    drawn = sampler.sample(logits, rows)
    errors = [None, NOT_A_NUMBER, NOT_A_NUMBER, NONE_LEFT, NONE_LEFT]
    assert [each.error for each in drawn] == errors
    assert [each.token for each in drawn] == [0, -1, -1, -1, -1]


# Log-probabilities.


def test_logprobs_are_of_the_raw_logits_and_sum_to_one(sampler: Sampler, level: str) -> None:
    logits = torch.randn(2, 333, generator=torch.Generator().manual_seed(2)) * 8
    wanted = torch.log_softmax(logits.double(), dim=1)
    found = sampler.logprobs(logits, [5, 7], 333)
    for place, (one, token) in enumerate(zip(found, (5, 7), strict=True)):
        assert one is not None
        assert one.logprob == pytest.approx(wanted[place, token].item(), abs=1e-12)
        assert [token for token, _ in one.top] == wanted[place].argsort(descending=True).tolist()
        assert sum(math.exp(value) for _, value in one.top) == pytest.approx(1, abs=1e-12)
    changed = row([1], 0, temperature=0.3, top_k=3, repetition_penalty=3.0, logprobs=1)
    drawn = draw(sampler, logits[0], changed)
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(wanted[0, drawn.token].item(), abs=1e-12)


def test_logprobs_of_equals_name_the_lowest_ids(sampler: Sampler, level: str) -> None:
    [one] = sampler.logprobs(torch.zeros(1, 100), [50], 3)
    assert one is not None
    assert [token for token, _ in one.top] == [0, 1, 2]
    assert one.logprob == pytest.approx(-math.log(100), abs=1e-12)


def test_logprobs_of_nan_are_none(sampler: Sampler) -> None:
    assert sampler.logprobs(torch.tensor([[0.0, math.nan]]), [0], 1) == [None]


def test_bad_input_is_refused() -> None:
    sampler = NativeSampler()
    with pytest.raises(ValueError, match="float32"):
        sampler.sample(torch.zeros(1, 4, dtype=torch.float64), [row()])
    with pytest.raises(ValueError, match="rows"):
        sampler.sample(torch.zeros(2, 4), [row()])
    with pytest.raises(ValueError, match="mask"):
        sampler.sample(torch.zeros(1, 64), [row(mask=words({1}, 32))])
    with pytest.raises(ValueError, match="outside"):
        sampler.logprobs(torch.zeros(1, 4), [4], 0)
