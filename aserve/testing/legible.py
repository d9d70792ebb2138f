"""A runner without tensors: it caches integers in real pages and hashes what it reads back.

A fault in paging, chunking, commits or resumption changes what it says; `oracle` never heard of
pages and knows the right answer.
"""

from collections.abc import Iterable
from typing import NamedTuple

from aserve.core.message import LAGGING, Result, StepPlan, StepReport
from aserve.core.noise import mix64
from aserve.core.replica import Replica, RowsView


def next_token(tokens: Iterable[int], seed: int, vocab: int) -> int:
    """What follows `tokens` under `seed`."""
    state = mix64(seed)
    for token in tokens:
        state = mix64(state ^ token)
    return state % vocab


def oracle(prompt: Iterable[int], seed: int, vocab: int, n_tokens: int) -> list[int]:
    """The tokens that follow `prompt`."""
    tokens = list(prompt)
    prompt_len = len(tokens)
    for _ in range(n_tokens):
        tokens.append(next_token(tokens, seed, vocab))
    return tokens[prompt_len:]


class LegibleWork(NamedTuple):
    step: int
    views: tuple[RowsView, ...]
    digest: int


class LegibleOutward(NamedTuple):
    results: tuple[Result, ...]
    digest: int


class LegibleRunner:
    """Takes the place of aserve.runner.runner.Runner; logprobs and grammars it has none."""

    def __init__(self, page_size: int, pages_total: int, vocab: int, fails_at: int = -1) -> None:
        self._replica = Replica(page_size)
        self._slots = [-1] * (page_size * pages_total)
        self._vocab = vocab
        self._fails_at = fails_at
        self._drawn: dict[int, int] = {}  # by sequence, the last token

    def apply(self, plan: StepPlan) -> LegibleWork:
        views = self._replica.apply(plan).views
        return LegibleWork(plan.step, views, self._replica.digest)

    def forward(self, work: LegibleWork, inward: None) -> LegibleOutward:
        if work.step == self._fails_at:
            raise ArithmeticError("told to fail")
        for view in work.views:
            for slot, token in zip(view.slots(), view.rows.tokens, strict=True):
                self._slots[slot] = self._drawn[view.rows.seq] if token == LAGGING else token
        return LegibleOutward(tuple(self._result(view) for view in work.views), work.digest)

    def _result(self, view: RowsView) -> Result:
        path = tuple(range(view.n_rows))
        if not view.rows.sample:
            return Result(view.rows.seq, path, ())
        size = view.page_size
        read = [self._slots[page * size + at] for page in view.state.pages for at in range(size)]
        token = next_token(read[: view.kv_len], view.state.sampling.seed, self._vocab)
        self._drawn[view.rows.seq] = token
        return Result(view.rows.seq, path, (token,))

    def report(self, plan: StepPlan, outward: LegibleOutward) -> StepReport:
        return StepReport(plan.step, 0, outward.digest, outward.results, (), (), 1)
