"""The sampling kernels beside their twins, for `bench.device_check`."""

from aserve.core.message import Sampling
from aserve.tensor.cuda import CudaOps
from aserve.tensor.cuda_sampler import CudaSampler
from aserve.tensor.sampler import History, SampleRow
from aserve.tensor.sampler_reference import ReferenceSampler
from bench.device_cases import Case, Random

PARAMETERS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.2, "top_k": 100},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.5, "top_k": 300, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0.8, "presence_penalty": -1.0, "logit_bias": ((5, 20.0), (1 << 20, 3.0))},
    {"temperature": 1.0, "bad_words": ((7,), (1, 6)), "min_tokens": 9, "stop_ids": (8,)},
)


def rows(seed: int) -> list[SampleRow]:
    return [one_row(seed + place, one) for place, one in enumerate(PARAMETERS)]


def one_row(seed: int, parameters: dict[str, object]) -> SampleRow:
    sampling = Sampling(seed=seed, **parameters)  # type: ignore[arg-type]
    return SampleRow(History(sampling, [3, 5, 5, 7, 6, 1], 2), seed)


def draws(ops: CudaOps, random: Random) -> float:
    """Tokens alike, on smooth logits and on few distinct ones, vocabularies of any size."""
    wrong = 0
    for vocab in (9, 1003, 49152):
        for logits in (random.normal(len(PARAMETERS), vocab) * 3,
                       (random.normal(len(PARAMETERS), vocab) * 2).round()):  # fmt: skip
            many = rows(vocab)
            got = CudaSampler(ops).sample(random.here(logits), many)
            wrong += got != ReferenceSampler().sample(logits, many)
    none = random.normal(2, 50)
    none[0, 3], none[1] = float("nan"), float("-inf")
    few = rows(1)[:2]
    wrong += CudaSampler(ops).sample(random.here(none), few) != ReferenceSampler().sample(none, few)
    return float("inf") if wrong else 0.0


def logprobs(ops: CudaOps, random: Random) -> float:
    worst = 0.0
    for vocab, top_n in ((9, 9), (1003, 0), (49152, 20)):
        logits = (random.normal(4, vocab) * 4).round() / 2
        tokens = [0, 1, vocab - 1, 2]
        told = CudaSampler(ops).logprobs(random.here(logits), tokens, top_n)
        for mine, twin in zip(told, ReferenceSampler().logprobs(logits, tokens, top_n),
                              strict=True):  # fmt: skip
            assert mine is not None
            assert twin is not None
            if [token for token, _ in mine.top] != [token for token, _ in twin.top]:
                return float("inf")
            pairs = zip([mine.logprob, *(v for _, v in mine.top)],
                        [twin.logprob, *(v for _, v in twin.top)], strict=True)  # fmt: skip
            worst = max(worst, *(abs(a - b) / 1e-9 for a, b in pairs))
    return worst


CASES: dict[str, Case] = {"draw": draws, "logprobs": logprobs}
