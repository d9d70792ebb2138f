"""A rank's runner: applies plans to its copy of the state, runs the model, reports what it drew."""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from aserve.core.message import Result, StepPlan, StepReport, TokenLogprob
from aserve.core.replica import Replica, RowsView
from aserve.models.registry import Model
from aserve.runner.draws import Draws
from aserve.runner.inputs import PageTables, StepInputs
from aserve.runner.kv_store import KvStore
from aserve.tensor.sampler import NOT_A_NUMBER, Drawn, Sampler, SampleRow
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer

LOGITS_ROWS_MAX = 64  # prompt rows whose logits are in memory at once


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One plan's rows beside the state they work on, and the digest of the log so far."""

    views: tuple[RowsView, ...]
    digest: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outward:
    results: tuple[Result, ...]
    digest: int
    micros: int


class Runner:
    """One rank that holds every layer. `apply` is cheap; `forward` is for the compute thread."""

    rank = 0

    def __init__(self, model: Model, kv: KvStore, sampler: Sampler, tokenizer: Tokenizer) -> None:
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._replica = Replica(kv.page_size)
        self._tables = PageTables(kv.page_size)
        self._draws = Draws(partial(grammar.compile, tokenizer=tokenizer, vocab=model.spec.vocab))

    def apply(self, plan: StepPlan) -> Work:
        """Bookkeeping; asserts that the plan follows from those before it."""
        views = self._replica.apply(plan).views
        for seq in plan.drops:
            self._tables.drop(seq)
            self._draws.drop(seq)
        return Work(views, self._replica.digest)

    def forward(self, work: Work, inward: None) -> Outward:
        """Run the rows through the model and draw. An error of one sequence is its own."""
        started = time.perf_counter()
        results: tuple[Result, ...] = ()
        if work.views:
            with torch.inference_mode():
                results = self._results(work.views)
        micros = round((time.perf_counter() - started) * 1e6)
        return Outward(results, work.digest, micros)

    def report(self, plan: StepPlan, outward: Outward) -> StepReport:
        return StepReport(
            plan.step, self.rank, outward.digest, outward.results, (), (), outward.micros
        )

    def _results(self, views: Sequence[RowsView]) -> tuple[Result, ...]:
        inputs = StepInputs(views, self._tables)
        hidden_TH = self._model.forward(inputs.tokens_T, self._kv.layers, inputs.attend)
        drawn = self._draw(views, hidden_TH, inputs.last_rows)
        results = []
        for place, view in enumerate(views):
            state, one = view.state, drawn[place]
            told: tuple[TokenLogprob, ...] = ()
            if state.sampling.prompt_logprobs >= 0:
                first = inputs.last_rows[place] + 1 - view.n_rows
                found = self._prompt_logprobs(view, hidden_TH[first : first + view.n_rows])
                if found is None:
                    one = Drawn(-1, error=NOT_A_NUMBER)
                else:
                    told = found
            results.append(_result(view, one, told))
        return tuple(results)

    def _draw(
        self, views: Sequence[RowsView], hidden_TH: Tensor, last_rows: Sequence[int]
    ) -> list[Drawn | None]:
        """For each view its draw, None if it takes none."""
        drawn: list[Drawn | None] = [None] * len(views)
        places: list[int] = []
        rows: list[SampleRow] = []
        for place, view in enumerate(views):
            if not view.rows.sample:
                continue
            row = self._draws.row(view.state)
            if isinstance(row, Drawn):
                drawn[place] = row
            else:
                places.append(place)
                rows.append(row)
        if rows:
            hidden_RH = hidden_TH
            if len(rows) != len(hidden_TH):
                hidden_RH = hidden_TH[[last_rows[place] for place in places]]
            logits_RV = self._model.logits(hidden_RH)
            for place, one in zip(places, self._sampler.sample(logits_RV, rows), strict=True):
                drawn[place] = one
        return drawn

    def _prompt_logprobs(
        self, view: RowsView, hidden_TH: Tensor
    ) -> tuple[TokenLogprob, ...] | None:
        """Of the prompt tokens behind these rows; None if a logit is not a number."""
        state, start = view.state, view.start
        end = min(start + view.n_rows, state.prompt_len - 1)
        told: list[TokenLogprob] = []
        for first in range(start, end, LOGITS_ROWS_MAX):
            last = min(first + LOGITS_ROWS_MAX, end)
            logits_RV = self._model.logits(hidden_TH[first - start : last - start])
            targets = state.tokens[first + 1 : last + 1]
            wanted = state.sampling.prompt_logprobs
            for one in self._sampler.logprobs(logits_RV, targets, wanted):
                if one is None:
                    return None
                told.append(one)
        return tuple(told)


def _result(view: RowsView, drawn: Drawn | None, told: tuple[TokenLogprob, ...]) -> Result:
    seq, path = view.rows.seq, tuple(range(view.n_rows))
    if drawn is None:
        return Result(seq, path, (), (), told)
    if drawn.error is not None:
        return Result(seq, path, (), error=drawn.error)
    logprobs = () if drawn.logprob is None else (drawn.logprob,)
    return Result(seq, path, (drawn.token,), logprobs, told)
