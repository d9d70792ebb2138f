"""The sampling kernels, against their twins."""

import numpy as np
import pytest
import torch

from aserve.tensor.cuda import CudaOps
from aserve.tensor.cuda_sampler import CudaSampler
from aserve.tensor.sampler import NativeSampler, SampleRow
from aserve.tensor.sampler_reference import ReferenceSampler
from tests.tensor.draws import row, words

VOCAB = 1003
PARAMETERS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": VOCAB},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.2, "top_k": 100},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.5, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.8, "presence_penalty": -1.0, "logit_bias": ((5, 20.0), (2000, 3.0))},
]


def logits(rows: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * spread


def drawn_rows(seed: int) -> list[SampleRow]:
    tokens = [3, 5, 5, 7, 900]
    return [row(tokens, 2, position=seed, seed=seed * 7, **one) for one in PARAMETERS]


@pytest.mark.parametrize("seed", range(4))
def test_draws_are_the_twins_and_the_native_ones(cuda_ops: CudaOps, seed: int) -> None:
    rows, x = drawn_rows(seed), logits(len(PARAMETERS), seed)
    drawn = CudaSampler(cuda_ops).sample(x, rows)
    assert drawn == ReferenceSampler().sample(x, rows)
    assert drawn == NativeSampler().sample(x, rows)


def test_equal_logits_stay_or_go_together(cuda_ops: CudaOps) -> None:
    x = (logits(12, 1) / 2).round() * 2  # a few values, many times each
    x[:, 3] = -0.0
    many = [
        row(position=place, seed=place, temperature=1.0, **one)
        for place, one in enumerate(
            [{"top_k": 5}, {"top_k": 200}, {"top_p": 0.5}, {"min_p": 0.3}] * 3
        )
    ]
    assert CudaSampler(cuda_ops).sample(x, many) == ReferenceSampler().sample(x, many)


def test_masks_bans_and_what_is_no_number(cuda_ops: CudaOps) -> None:
    x = logits(5, 2)
    x[2, 17] = float("nan")
    x[3, 17] = float("inf")
    x[4] = float("-inf")
    rows = [
        row(mask=words({4, 9, 1002}, VOCAB), temperature=1.0),
        row(mask=words(set(), VOCAB), temperature=1.0),
        *[row(temperature=0.5) for _ in range(3)],
    ]
    assert CudaSampler(cuda_ops).sample(x, rows) == ReferenceSampler().sample(x, rows)


def test_a_complete_grammar_wins_over_min_tokens(cuda_ops: CudaOps) -> None:
    ends = row([1], 1, mask=words({8}, VOCAB), temperature=1.0, min_tokens=4, stop_ids=(8,))
    free = row([1], 1, temperature=0.0, bad_words=((7,), (1, 6)))
    x = logits(2, 3)
    x[1, 6] = x[1, 7] = 100.0
    drawn = CudaSampler(cuda_ops).sample(x, [ends, free])
    assert drawn == ReferenceSampler().sample(x, [ends, free])
    assert drawn[0].token == 8


@pytest.mark.parametrize("top_n", [0, 1, 5, 128])
def test_logprobs_are_the_twins(cuda_ops: CudaOps, top_n: int) -> None:
    x = logits(4, 4)
    x[1] = x[1].round()  # ties: the lower id first
    x[2, 1:] = float("-inf")
    x[3, 0] = float("nan")
    tokens = [0, 1002, 0, 5]
    wanted = ReferenceSampler().logprobs(x, tokens, top_n)
    got = CudaSampler(cuda_ops).logprobs(x, tokens, top_n)
    assert got[3] is None
    assert wanted[3] is None
    for mine, twin in zip(got[:3], wanted[:3], strict=True):
        finite = [pair for pair in twin.top if pair[1] > float("-inf")]
        assert mine.logprob == pytest.approx(twin.logprob, abs=1e-9)
        assert [token for token, _ in mine.top] == [token for token, _ in finite]
        assert [v for _, v in mine.top] == pytest.approx([v for _, v in finite], abs=1e-9)


def test_more_logprobs_than_the_kernel_keeps_are_refused(cuda_ops: CudaOps) -> None:
    with pytest.raises(ValueError, match="at most 128"):
        CudaSampler(cuda_ops).logprobs(logits(1, 5), [0], 129)


def test_the_noise_is_that_of_the_specification(cuda_ops: CudaOps) -> None:
    """With flat logits the draw is the noise's own greatest."""
    from aserve.core.noise import draw_key, token_bits

    for position in range(5):
        drawn = CudaSampler(cuda_ops).sample(
            torch.zeros(1, VOCAB), [row(position=position, seed=11, temperature=1.0)]
        )
        key = draw_key(11, position)
        assert drawn[0].token == int(np.argmax([token_bits(key, t) for t in range(VOCAB)]))
