"""From logits to the next token of each sequence, and to log-probabilities.

Order, as in vLLM: grammar mask and logit_bias, repetition, frequency and presence penalties, bans
(bad words, stop ids before min_tokens); temperature; top_k, top_p, min_p; then Gumbel-max with
noise keyed by (seed, position, token): a draw depends on its own sequence and nothing else. Equal
logits stay or go together in the filters. Temperature below 1e-5 is greedy, the lowest id first.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve import _native
from aserve.core.message import NONE_LEFT, Sampling, TokenLogprob
from aserve.core.noise import U64

Ids = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]

NOT_A_NUMBER = "the model's logits are not numbers"
NO_TOKEN = {-1: NOT_A_NUMBER, -2: NONE_LEFT}  # why, as csrc/bind/sample.cpp tells it


class History:
    """What one sequence's parameters need to know of its tokens; kept up by `append`.

    A sequence that resumes after a retraction gets a new one from all its tokens.
    """

    def __init__(self, sampling: Sampling, tokens: Sequence[int], prompt_len: int) -> None:
        assert 0 <= prompt_len <= len(tokens), (prompt_len, len(tokens))
        self.sampling = sampling
        self.generated_len = len(tokens) - prompt_len
        self._stops = np.array(sampling.stop_ids, dtype=np.int32)
        self._words = tuple(word for word in sampling.bad_words if word)
        self._single = np.array([w[0] for w in self._words if len(w) == 1], dtype=np.int32)
        self._tail_len = max((len(word) - 1 for word in self._words), default=0)
        self._tail = list(tokens[len(tokens) - min(self._tail_len, len(tokens)) :])
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], dtype=np.int32)
        self.bias = np.array([bias for _, bias in sampling.logit_bias], dtype=np.float64)
        self._repeats = sampling.repetition_penalty != 1
        self._counts = self._repeats or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        # Draws look at the parameters only, once there were `min_tokens` tokens.
        self._is_plain = not (self._counts or self._words)
        self._params: _native.DrawParams | None = None
        self._place: dict[int, int] = {}
        self._seen_ids = np.zeros(16, dtype=np.int32)
        self._seen = np.zeros(16, dtype=np.int32)
        if self._repeats:
            for token in dict.fromkeys(tokens[:prompt_len]):
                self._count(token, 0)
        if self._counts:
            for token in tokens[prompt_len:]:
                self._count(token, 1)

    def append(self, token: int) -> None:
        self.generated_len += 1
        if self._counts:
            self._count(token, 1)
        if self._tail_len:
            self._tail.append(token)
            del self._tail[: -self._tail_len]

    @property
    def seen(self) -> tuple[Ids, Ids]:
        """Distinct ids that penalties look at, and how often each was generated."""
        known = len(self._place)
        return self._seen_ids[:known], self._seen[:known]

    def banned(self, *, stops: bool = True) -> Ids:
        """Ids that may not be drawn next; `stops`: with the stop ids that come too early."""
        parts = [self._single] if len(self._single) else []
        if stops and self.generated_len < self.sampling.min_tokens:
            parts.append(self._stops)
        if self._tail_len:
            last = [word[-1] for word in self._words if self._ends_with(word[:-1])]
            parts.append(np.array(last, dtype=np.int32))
        return np.concatenate(parts) if parts else self._single

    def draw(self, position: int, mask: Words | None, *, stops: bool = True) -> tuple[object, ...]:
        """A row as csrc/bind/sample.cpp reads it."""
        if self._params is None:
            self._params = _params(self)
        if mask is None and self._is_plain and self.generated_len >= self.sampling.min_tokens:
            return self._params, position
        return self._params, position, mask, *self.seen, self.banned(stops=stops)

    def _ends_with(self, words: tuple[int, ...]) -> bool:
        return bool(words) and tuple(self._tail[-len(words) :]) == words

    def _count(self, token: int, times: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._seen):
            self._seen_ids = np.concatenate([self._seen_ids, np.zeros_like(self._seen_ids)])
            self._seen = np.concatenate([self._seen, np.zeros_like(self._seen)])
        self._seen_ids[place] = token
        self._seen[place] += times


class SampleRow(msgspec.Struct):
    """One draw: of the token that will stand at `position` of its sequence.

    `mask` has bit `id % 32` of word `id // 32` set if the grammar allows `id`.
    """

    history: History
    position: int
    mask: Words | None = None


class Drawn(msgspec.Struct, frozen=True):
    """`token` is -1 where `error` says why there is none; `logprob` is there if asked for."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler(Protocol):
    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Drawn]:
        """Draws from float32 logits, row by row; the logits are left as they are."""
        ...

    def logprobs(
        self, logits_RV: Tensor, tokens: Sequence[int], top_n: int
    ) -> list[TokenLogprob | None]:
        """log softmax of each row at its token, and of the `top_n` best. None where it is NaN."""
        ...


class NativeSampler:
    """`Sampler` by the kernels of csrc; `team` shares rows out to threads."""

    def __init__(self, team: _native.Team | None = None) -> None:
        self._team = team

    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Drawn]:
        address, stride, vocab = _checked(logits_RV, len(rows))
        fields = [row.history.draw(row.position, row.mask) for row in rows]
        told = _native.draw(self._team, address, stride, vocab, fields)
        drawn = []
        for place, token in enumerate(told):
            if token == -2 and rows[place].history.generated_len < _min_tokens(rows[place]):
                # A grammar that is complete allows only the end; it wins over min_tokens.
                row = rows[place]
                fields = [row.history.draw(row.position, row.mask, stops=False)]
                here = address + 4 * stride * place
                [token] = _native.draw(self._team, here, stride, vocab, fields)
            drawn.append(Drawn(token) if token >= 0 else Drawn(-1, None, NO_TOKEN[token]))
        return self._with_logprobs(logits_RV, rows, drawn)

    def _with_logprobs(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], drawn: list[Drawn]
    ) -> list[Drawn]:
        asked = [
            (place, one.token, row.history.sampling.logprobs)
            for place, (row, one) in enumerate(zip(rows, drawn, strict=True))
            if row.history.sampling.logprobs >= 0 and one.error is None
        ]
        if asked:
            address, stride, vocab = _checked(logits_RV, len(rows))
            told = _native.logprobs(self._team, address, stride, vocab, asked)
            for (place, token, _), found in zip(asked, told, strict=True):
                drawn[place] = Drawn(token, TokenLogprob(token, *found))
        return drawn

    def logprobs(
        self, logits_RV: Tensor, tokens: Sequence[int], top_n: int
    ) -> list[TokenLogprob | None]:
        address, stride, vocab = _checked(logits_RV, len(tokens))
        asked = [(place, token, top_n) for place, token in enumerate(tokens)]
        told = _native.logprobs(self._team, address, stride, vocab, asked)
        return [
            None if found is None else TokenLogprob(token, *found)
            for token, found in zip(tokens, told, strict=True)
        ]


def _checked(logits_RV: Tensor, row_count: int) -> tuple[int, int, int]:
    """Address, floats from a row to the next, and vocabulary."""
    if logits_RV.dtype != torch.float32 or logits_RV.dim() != 2 or logits_RV.stride(1) != 1:
        raise ValueError("logits must be float32 [rows, vocab] with adjacent columns")
    if logits_RV.shape[0] != row_count:
        raise ValueError(f"{logits_RV.shape[0]} rows of logits for {row_count} rows")
    return logits_RV.data_ptr(), logits_RV.stride(0), logits_RV.shape[1]


def _min_tokens(row: SampleRow) -> int:
    return row.history.sampling.min_tokens


def _params(history: History) -> "_native.DrawParams":
    """As csrc/bind/sample.cpp reads them."""
    sampling = history.sampling
    return _native.DrawParams(
        (
            sampling.temperature,
            max(sampling.top_k, 0),
            sampling.top_p,
            sampling.min_p,
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
            sampling.seed & U64,
            history.bias_ids,
            history.bias,
        )
    )


def open_sampler(kernels: str, team: _native.Team | None = None) -> Sampler:
    """The sampler that goes with `open_ops(kernels, ...)`; `kernels` is native or reference."""
    if kernels == "native":
        return NativeSampler(team)
    from aserve.tensor.sampler_reference import ReferenceSampler

    return ReferenceSampler()
