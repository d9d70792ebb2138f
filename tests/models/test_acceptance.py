"""What drafts leave of the model's distribution (all of it), and how often they are accepted: as
often as it says, where they do not know the noise of its draws."""

import functools
import pathlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch

from aserve.core.config import Accept, Layout
from aserve.core.message import Admit, Result, Rows, Sampling
from aserve.runner.foresight import Foresight, noise_of
from aserve.tensor.tree import open_trees
from tests.models.test_rank_steps import NO_TOKENIZER, Ranks, plan

pytestmark = pytest.mark.slow

PROMPT = (40, 41, 42, 43)
TOPK, TEMPERATURE = 5, 0.9
SEEDS, TOGETHER, PAGES_EACH = 3000, 300, 2
# Of chi-square, exceeded by one in 10,000: by degrees of freedom.
LIMIT = {1: 15.1, TOPK - 1: 23.5}

Probabilities = Mapping[int, float]  # by token
Siblings = Callable[[int], Sequence[int]]  # drafted under a seed


def sampling(seed: int, logprobs: int = -1) -> Sampling:
    return Sampling(seed=seed, temperature=TEMPERATURE, top_k=TOPK, logprobs=logprobs)


def told(
    folder: pathlib.Path, prompt: Sequence[int], asked: Sequence[Sampling], siblings: Siblings
) -> tuple[Result, ...]:
    """What each of these says below the prompt, its last token the root of a draft."""
    ranks = Ranks(Layout(), folder, NO_TOKENIZER, len(asked) * PAGES_EACH)
    known, root = tuple(prompt[:-1]), prompt[-1]
    admits, chunks, trees = [], [], []
    for seq, one in enumerate(asked):
        admits.append(Admit(seq, tuple(prompt), len(prompt), 0, (), one))
        pages = tuple(range(seq * PAGES_EACH, (seq + 1) * PAGES_EACH))
        chunks.append(Rows(seq, 0, known, (), False, pages))
        tokens = (root, *siblings(one.seed))
        parents = (-1, *[0] * (len(tokens) - 1))
        trees.append(Rows(seq, len(known), tokens, parents, True, ()))
    ranks.step(plan(0, tuple(chunks), admits=tuple(admits)))
    return ranks.step(plan(1, tuple(trees)))[0].results


@functools.cache
def expected(folder: pathlib.Path, prompt: tuple[int, ...]) -> Probabilities:
    """Of the next token, the likeliest first."""
    (result,) = told(folder, prompt, [sampling(0, logprobs=TOPK)], lambda seed: (0,))
    logprobs = np.array([logprob for _, logprob in result.logprobs[0].top])
    weights = np.exp((logprobs - logprobs.max()) / TEMPERATURE)
    tokens = [token for token, _ in result.logprobs[0].top]
    return dict(zip(tokens, (weights / weights.sum()).tolist(), strict=True))


def drawn(folder: pathlib.Path, siblings: Siblings) -> list[Result]:
    results: list[Result] = []
    for first in range(0, SEEDS, TOGETHER):
        asked = [sampling(seed) for seed in range(first, first + TOGETHER)]
        results += told(folder, PROMPT, asked, siblings)
    return results


def two_of(accept: Accept, probabilities: Probabilities) -> Siblings:
    """The two that a drafter with the model's own logits proposes."""
    logits_RV = torch.full((1, 400), -torch.inf)
    for token, probability in probabilities.items():
        logits_RV[0, token] = TEMPERATURE * float(np.log(probability))
    trees = open_trees("reference")

    def siblings(seed: int) -> list[int]:
        positions_N = np.array([len(PROMPT)], dtype=np.int32)
        noise = noise_of(accept, [sampling(seed)], positions_N)
        found: list[int] = Foresight(trees, noise, 2).top(logits_RV).tokens_RK[0].tolist()
        return found

    return siblings


def chi_square(counts: Mapping[int, int], probabilities: Probabilities) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    return sum(
        (counts.get(token, 0) - total * probability) ** 2 / (total * probability)
        for token, probability in probabilities.items()
    )


@pytest.mark.parametrize("accept", ["noise", "rejection"])
def test_drafts_leave_the_distribution_as_it_is(
    tiny_model_path: pathlib.Path, accept: Accept
) -> None:
    probabilities = expected(tiny_model_path, PROMPT)
    results = drawn(tiny_model_path, two_of(accept, probabilities))
    first = Counter(result.tokens[0] for result in results)
    assert chi_square(first, probabilities) < LIMIT[TOPK - 1]
    for token in list(probabilities)[:2]:
        below = expected(tiny_model_path, (*PROMPT, token))
        then = Counter(
            result.tokens[1]
            for result in results
            if result.tokens[0] == token and len(result.tokens) > 1
        )
        assert then.total() > 200
        assert chi_square(then, below) < LIMIT[TOPK - 1]
    flat = dict.fromkeys(probabilities, 1 / TOPK)
    assert chi_square(first, flat) > LIMIT[TOPK - 1], "it would be seen"


def test_a_draft_that_does_not_know_the_noise_is_accepted_as_often_as_the_model_would_say_it(
    tiny_model_path: pathlib.Path,
) -> None:
    probabilities = expected(tiny_model_path, PROMPT)
    siblings = two_of("rejection", probabilities)
    best, second = list(probabilities)[:2]
    assert siblings(1) == siblings(2) == [best, second]
    results = drawn(tiny_model_path, siblings)
    paths = Counter(result.path[-1] for result in results)
    assert {result.path for result in results} == {(0,), (0, 1), (0, 2)}
    mass = {1: probabilities[best], 2: probabilities[second]}
    assert chi_square(paths, {**mass, 0: 1 - sum(mass.values())}) < LIMIT[1]
    rest = {
        t: p / (1 - sum(mass.values())) for t, p in probabilities.items() if t not in siblings(1)
    }
    refused = Counter(result.tokens[0] for result in results if len(result.path) == 1)
    assert chi_square(refused, rest) < LIMIT[TOPK - 1]


def test_a_draft_that_knows_the_noise_is_accepted_whenever_its_logits_are_the_models(
    tiny_model_path: pathlib.Path,
) -> None:
    siblings = two_of("noise", expected(tiny_model_path, PROMPT))
    results = drawn(tiny_model_path, siblings)
    assert sum(result.path == (0, 1) for result in results) > 0.99 * SEEDS
