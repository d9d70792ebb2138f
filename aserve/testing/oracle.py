"""What the legible model says, from the tokens alone: no pages, chunks, ranks, trees or steps."""

import msgspec
import numpy as np

from aserve.core.message import GRAMMAR_FAULT, TokenLogprob
from aserve.core.request import FinishReason, Request
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints, Shape

ALL_HEADS, ALL_UNITS = slice(0, model.HEADS), slice(0, model.UNITS)


class Said(msgspec.Struct, frozen=True):
    """The whole answer to a request. `beyond` goes on after its end, for who guesses too far."""

    tokens: tuple[int, ...]
    beyond: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    error: str | None = None


class Reading:
    """The state after some tokens: what each layer and head summed up so far."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.n_tokens = 0
        self._sums = [np.zeros((model.HEADS, 1), np.uint64) for _ in range(shape.layers)]

    def push(self, tokens: tuple[int, ...]) -> Ints:
        """[T] hidden integers behind the last layer, of the next tokens."""
        start, end = self.n_tokens, self.n_tokens + len(tokens)
        positions = np.arange(start, end, dtype=np.uint64)
        hidden = model.embed(np.array(tokens, dtype=np.uint64), positions)
        for layer in range(self.shape.layers):
            weighted = model.cached(layer, hidden, ALL_HEADS) * model.WEIGHTS[start:end]
            sums = self._sums[layer] + np.cumsum(weighted, axis=1, dtype=np.uint64)
            self._sums[layer] = sums[:, -1:]
            heads = model.read(layer, sums, ALL_HEADS)
            hidden = model.add(hidden, heads.sum(0, dtype=np.uint64))
            hidden = model.add(hidden, self._wide(layer, hidden))
        self.n_tokens = end
        return hidden

    def _wide(self, layer: int, hidden: Ints) -> Ints:
        if not self.shape.experts:
            return model.units(layer, hidden, ALL_UNITS)
        first, second = model.chosen_experts(layer, hidden)
        return model.expert(layer, hidden, first, ALL_UNITS) + model.expert(
            layer, hidden, second, ALL_UNITS
        )


def _scores(hidden: int, key: int, vocab: int) -> Ints:
    pair = np.array([hidden], dtype=np.uint64), np.array([key], dtype=np.uint64)
    return model.scores(*pair, slice(0, vocab))[0]


def say(request: Request, shape: Shape, n_beyond: int = 0) -> Said:
    """The answer to a request, and `n_beyond` tokens after it."""
    sampling, vocab = request.sampling, shape.vocab
    reading = Reading(shape)
    hidden = reading.push(request.tokens)
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.prompt_logprobs >= 0:
        prompt_logprobs = tuple(
            model.told(token, _scores(int(row), 0, vocab), sampling.prompt_logprobs)
            for token, row in zip(request.tokens[1:], hidden, strict=False)
        )
    made: list[int] = []
    logprobs: list[TokenLogprob] = []
    ended: FinishReason | None = None
    n_said = 0
    last = int(hidden[-1])
    while ended is None or len(made) < n_said + n_beyond:
        if model.broken(sampling, made):
            if ended is None:
                ended, n_said = "error", len(made)
            break
        key = model.score_key(sampling, len(request.tokens) + len(made))
        values = _scores(last, key, vocab)
        token = model.best(values, model.allowed(sampling, made, vocab))
        made.append(token)
        if ended is None:
            if sampling.logprobs >= 0:
                logprobs.append(model.told(token, values, sampling.logprobs))
            ended, n_said = _ended(request, made), len(made)
        last = int(reading.push((token,))[-1])
    assert ended is not None
    error = f"{GRAMMAR_FAULT}: the rule broke" if ended == "error" else None
    tokens, beyond = tuple(made[:n_said]), tuple(made[n_said:])
    return Said(tokens, beyond, ended, tuple(logprobs), prompt_logprobs, error)


def _ended(request: Request, made: list[int]) -> FinishReason | None:
    sampling = request.sampling
    early = len(made) <= sampling.min_tokens and sampling.grammar is None
    if made[-1] in sampling.stop_ids and not early:
        return "stop"
    return "length" if len(made) >= request.max_tokens else None
