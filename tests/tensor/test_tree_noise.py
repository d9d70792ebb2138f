"""A draft under the target's own noise proposes what the target will draw."""

import math

import pytest
import torch

from aserve.core.message import Sampling
from aserve.tensor.sampler import History, SampleRow
from aserve.tensor.sampler_reference import ReferenceSampler
from aserve.tensor.tree import Noise, Top, Trees
from aserve.tensor.tree_native import NativeTrees
from aserve.tensor.tree_reference import ReferenceTrees
from tests.tensor.tree_cases import NAN, ints

TWIN = ReferenceTrees()
VOCAB = 90


def noise_of(seeds: list[int], positions: list[int], temperatures: list[float]) -> Noise:
    return Noise(torch.tensor(seeds), ints(positions), torch.tensor(temperatures))


def random_case(rows: int = 12, m: int = 40) -> tuple[Top, Noise]:
    generator = torch.Generator().manual_seed(rows)
    logprobs = (torch.randn(rows, VOCAB, generator=generator) * 3).log_softmax(-1)
    found = logprobs.sort(dim=-1, descending=True)
    top = Top(found.values[:, :m].contiguous(), found.indices[:, :m].int().contiguous())
    temperatures = [0.0, 1e-6, *(0.3 + 0.2 * row for row in range(rows - 2))]
    seeds = [row * 977 - (1 << 62) for row in range(rows)]
    return top, noise_of(seeds, list(range(5, 5 + rows)), temperatures)


@pytest.mark.parametrize("temperature", [0.0, 0.4, 1.0, 1.7])
def test_the_first_is_what_the_target_draws_if_its_logits_are_the_drafts(
    trees: Trees, temperature: float
) -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    sampling = [Sampling(seed=seed, temperature=temperature) for seed in range(20)]
    rows = [SampleRow(History(one, [1], 1), 7 + at) for at, one in enumerate(sampling)]
    drawn = [one.token for one in ReferenceSampler().sample(logits, rows)]
    noise = noise_of(list(range(20)), list(range(7, 27)), [temperature] * 20)
    found = trees.under_noise(trees.top(logits, VOCAB), noise, 3)
    assert found.tokens_RK[:, 0].tolist() == drawn
    assert found.logprobs_RK.diff(dim=1).le(0).all()
    # Without noise, what is likeliest is drawn seldom.
    likeliest = trees.top(logits, 1).tokens_RK[:, 0].tolist()
    assert (likeliest == drawn) == (temperature == 0)


@pytest.mark.parametrize("k", [1, 8, 40])
def test_rows_under_noise_are_the_twins(native: NativeTrees, k: int) -> None:
    top, noise = random_case()
    got, wanted = native.under_noise(top, noise, k), TWIN.under_noise(top, noise, k)
    assert torch.equal(got.tokens_RK, wanted.tokens_RK)
    torch.testing.assert_close(got.logprobs_RK, wanted.logprobs_RK)
    assert torch.equal(got.logprobs_RK[:2], top.logprobs_RK[:2, :k])
    if k == 40:
        torch.testing.assert_close(got.logprobs_RK[2:].exp().sum(-1), torch.ones(10))


def test_what_is_no_number_comes_last_in_its_order(native: NativeTrees) -> None:
    scores = torch.tensor([[NAN] * 3, [-0.5, -math.inf, -1.0], [-0.5, NAN, -1.0]])
    top = Top(scores, torch.arange(9).int().view(3, 3))
    noise = noise_of([4, 5, 6], [1, 2, 3], [1.0, 1.0, 1.0])
    got, wanted = native.under_noise(top, noise, 3), TWIN.under_noise(top, noise, 3)
    assert torch.equal(got.tokens_RK, wanted.tokens_RK)
    torch.testing.assert_close(got.logprobs_RK, wanted.logprobs_RK, equal_nan=True)
    assert got.tokens_RK[0].tolist() == [0, 1, 2]
    assert got.tokens_RK[1, 2] == 4
    assert got.tokens_RK[2, 2] == 7


def test_misfits_of_noise_are_refused(trees: Trees) -> None:
    top, noise = random_case(3, 4)
    with pytest.raises(ValueError, match="5 of 4 tokens"):
        trees.under_noise(top, noise, 5)
    with pytest.raises(ValueError, match="for 3 rows"):
        trees.under_noise(top, noise_of([1], [1], [1.0]), 1)
