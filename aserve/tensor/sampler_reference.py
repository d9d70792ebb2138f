"""The plain twin of the sampler: whole-vocabulary numpy in float64, one row after the other."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from aserve.core.message import NONE_LEFT, TokenLogprob
from aserve.core.noise import GOLDEN32, U32, draw_key
from aserve.tensor.sampler import NOT_A_NUMBER, Drawn, History, SampleRow

Logits = npt.NDArray[np.float64]

TEMPERATURE_MIN = 1e-5


class ReferenceSampler:
    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Drawn]:
        assert len(logits_RV) == len(rows), (len(logits_RV), len(rows))
        return [_draw(logits_RV[place].double().numpy(), row) for place, row in enumerate(rows)]

    def logprobs(
        self, logits_RV: Tensor, tokens: Sequence[int], top_n: int
    ) -> list[TokenLogprob | None]:
        assert len(logits_RV) == len(tokens), (len(logits_RV), len(tokens))
        return [
            logprob(logits_RV[place].double().numpy(), token, top_n)
            for place, token in enumerate(tokens)
        ]


def _draw(raw_V: Logits, row: SampleRow) -> Drawn:
    sampling = row.history.sampling
    if np.isnan(raw_V).any() or np.isposinf(raw_V).any():
        return Drawn(-1, error=NOT_A_NUMBER)
    logits_V = edited(raw_V, row, row.history.banned())
    if np.isneginf(logits_V).all() and row.history.generated_len < sampling.min_tokens:
        logits_V = edited(raw_V, row, row.history.banned(stops=False))
    if np.isneginf(logits_V).all():
        return Drawn(-1, error=NONE_LEFT)
    if sampling.temperature < TEMPERATURE_MIN:
        token = int(logits_V.argmax())
    else:
        scaled_V = filtered(logits_V, row.history)
        key = draw_key(sampling.seed, row.position)
        token = int((scaled_V + gumbel_noise(key, len(raw_V))).argmax())
    told = logprob(raw_V, token, sampling.logprobs) if sampling.logprobs >= 0 else None
    return Drawn(token, told)


def edited(raw_V: Logits, row: SampleRow, banned: npt.NDArray[np.int32]) -> Logits:
    """Logits under mask, bias, penalties (OpenAI's; repetition: arXiv 1909.05858) and bans.

    Rounded to float32 after the bias and after the penalties, as the kernel stores them.
    """
    history, sampling, vocab = row.history, row.history.sampling, len(raw_V)
    logits_V = raw_V.copy()
    if row.mask is not None:
        allowed_V = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:vocab]
        logits_V[allowed_V == 0] = -np.inf
    for token, bias in zip(history.bias_ids.tolist(), history.bias.tolist(), strict=True):
        if 0 <= token < vocab:
            logits_V[token] = np.float32(logits_V[token] + bias)
    for token, times in zip(*(part.tolist() for part in history.seen), strict=True):
        if not 0 <= token < vocab:
            continue
        logit, repetition = logits_V[token], sampling.repetition_penalty
        logit = logit / repetition if logit > 0 else logit * repetition
        if times:
            logit = logit - sampling.frequency_penalty * times - sampling.presence_penalty
        logits_V[token] = np.float32(logit)
    logits_V[[token for token in banned.tolist() if 0 <= token < vocab]] = -np.inf
    return logits_V


def filtered(logits_V: Logits, history: History) -> Logits:
    """(logit - max) / temperature, -inf where top_k, top_p or min_p leaves a token out."""
    sampling = history.sampling
    scaled_V: Logits = (logits_V - logits_V.max()) * (1.0 / sampling.temperature)
    if 0 < sampling.top_k < len(scaled_V):
        scaled_V[scaled_V < np.sort(scaled_V)[-sampling.top_k]] = -np.inf
    best_first = np.sort(scaled_V)[::-1]
    weights = np.exp(best_first)
    if sampling.top_p < 1:
        mass = np.cumsum(weights)
        last = min(int(np.searchsorted(mass, sampling.top_p * weights.sum())), len(mass) - 1)
        scaled_V[scaled_V < best_first[last]] = -np.inf
    if sampling.min_p > 0:
        scaled_V[scaled_V < np.log(sampling.min_p)] = -np.inf
    return scaled_V


def gumbel_noise(key: int, vocab: int) -> Logits:
    """The noise of every token under a draw key; core/noise.py has the specification."""
    tokens = np.arange(vocab, dtype=np.uint64)
    inner = (tokens * np.uint64(GOLDEN32) + np.uint64(key & U32)) & np.uint64(U32)
    bits = _mix32((_mix32(inner) + np.uint64(key >> 32)) & np.uint64(U32))
    noise: Logits = -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-32))
    return noise


def _mix32(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    low = np.uint64(U32)
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x21F0_AAAD)) & low
    x = ((x ^ (x >> np.uint64(15))) * np.uint64(0x735A_2D97)) & low
    return x ^ (x >> np.uint64(15))


def logprob(raw_V: Logits, token: int, top_n: int) -> TokenLogprob | None:
    """log softmax at `token` and of the `top_n` best, the lower id first among equals."""
    best = raw_V.max()
    if not np.isfinite(best):
        return None
    logprobs_V = raw_V - (best + np.log(np.exp(raw_V - best).sum()))
    top = np.argsort(-raw_V, kind="stable")[:top_n] if top_n > 0 else ()
    return TokenLogprob(
        token,
        float(logprobs_V[token]),
        tuple((int(one), float(logprobs_V[one])) for one in top),
    )
