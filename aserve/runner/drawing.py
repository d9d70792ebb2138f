"""From the last hidden states of a step to the results of its rows.

Every rank of the last stage takes part with its columns of the vocabulary; the leader of a DP group
draws for it. Which rows need logits follows from the plan, so all ranks know of all.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from aserve.core.message import Result, TokenLogprob
from aserve.core.replica import RowsView
from aserve.models.registry import Model
from aserve.runner.draws import Draws
from aserve.tensor.sampler import NOT_A_NUMBER, Drawn, Sampler, SampleRow
from aserve.tensor.tokens import Seat, Tokens

# Nobody sees it: the error of the draw before has ended the sequence.
NOTHING_BEFORE = "nothing was drawn before this row"
ONE_ROW = (0,)  # the path of a row that is no tree
LOGITS_ROWS_MAX = 64  # prompt rows whose logits are in memory at once

Head = Callable[[Sequence[int]], Tensor]  # at a leader the logits of its group's rows among these
Told = dict[int, tuple[TokenLogprob, ...] | None]  # by the place of a view; None: not a number


class Drawing:
    """Keeps nothing of a step; `draws` are used at a leader only."""

    def __init__(self, model: Model, seat: Seat, sampler: Sampler, draws: Draws) -> None:
        self._model = model
        self._seat = seat
        self._sampler = sampler
        self._draws = draws
        self._group = seat.place.dp if seat.is_leader else -1  # whose tokens are drawn here

    def results(
        self,
        views: Sequence[RowsView],
        tokens: Tokens,
        last_rows: Sequence[int],
        hidden_TH: Tensor,
    ) -> tuple[Result, ...]:
        """Of the rows of this rank's DP group if it is its leader, else none.

        `last_rows` are those of `views`, by their numbers in the plan.
        """
        head = partial(self._logits, tokens, hidden_TH)
        drawn = self._draw(views, last_rows, head)
        told = self._prompt_logprobs(views, last_rows, head)
        return tuple(
            [
                _result(view, drawn.get(place), told.get(place, ()))
                for place, view in enumerate(views)
                if view.group == self._group
            ]
        )

    def _draw(
        self, views: Sequence[RowsView], last_rows: Sequence[int], head: Head
    ) -> dict[int, Drawn]:
        """By the place of its view, each draw of this rank's group."""
        places = [place for place, view in enumerate(views) if view.rows.sample]
        if not places:
            return {}
        own = [place for place in places if views[place].group == self._group]
        # All that Python does comes before the logits: the threads that make them are still awake
        # when it is their turn to draw.
        asked = [self._row(views[place]) for place in own]
        rows = [row for row in asked if isinstance(row, SampleRow)]
        logits_RV = head([last_rows[place] for place in places])
        assert len(own) == logits_RV.shape[0], (len(own), logits_RV.shape)
        if len(rows) < len(own):
            logits_RV = logits_RV[[isinstance(row, SampleRow) for row in asked]]
        found = iter(self._sampler.sample(logits_RV, rows) if rows else ())
        drawn: dict[int, Drawn] = {}
        for place, row in zip(own, asked, strict=True):
            one = drawn[place] = row if isinstance(row, Drawn) else next(found)
            view = views[place]
            self._draws.drew(view.rows.seq, view.kv_len, -1 if one.error else one.token)
        return drawn

    def _row(self, view: RowsView) -> SampleRow | Drawn:
        if view.rows.is_lagging and self._draws.last(view.rows.seq) < 0:
            return Drawn(-1, error=NOTHING_BEFORE)
        return self._draws.row(view.state, view.kv_len)

    def _logits(self, tokens: Tokens, hidden_TH: Tensor, rows: Sequence[int]) -> Tensor:
        """At a leader those of its group's `rows` (numbers in the plan), in their order."""
        picked = tokens.pick(hidden_TH, rows)
        logits_RV = self._model.logits(picked.x_WH, picked.counts, self._seat)
        if picked.back is None or not self._seat.is_leader:
            return logits_RV
        return logits_RV[picked.back]

    def _prompt_logprobs(
        self, views: Sequence[RowsView], last_rows: Sequence[int], head: Head
    ) -> Told:
        """Of the prompt tokens behind these rows, where they are asked for."""
        told: Told = {}
        wanted = [
            (place, row, target)
            for place, view in enumerate(views)
            if view.state.sampling.prompt_logprobs >= 0
            for row, target in _prompt_rows(view, last_rows[place])
        ]
        for first in range(0, len(wanted), LOGITS_ROWS_MAX):
            round_ = wanted[first : first + LOGITS_ROWS_MAX]
            logits_RV = head([row for _, row, _ in round_])
            own = [
                (place, target) for place, _, target in round_ if views[place].group == self._group
            ]
            start = 0
            for place, rows in itertools.groupby(own, lambda one: one[0]):
                targets = [target for _, target in rows]
                some_RV = logits_RV[start : start + len(targets)]
                start += len(targets)
                count = views[place].state.sampling.prompt_logprobs
                _tell(told, place, self._sampler.logprobs(some_RV, targets, count))
        return told


def _prompt_rows(view: RowsView, last_row: int) -> list[tuple[int, int]]:
    """(number in the plan, token that comes next) of each row that predicts a prompt token."""
    start, first_row = view.start, last_row + 1 - view.n_rows
    end = min(start + view.n_rows, view.state.prompt_len - 1)
    tokens = view.state.tokens
    return [(first_row + at - start, tokens[at + 1]) for at in range(start, end)]


def _tell(told: Told, place: int, found: Sequence[TokenLogprob | None]) -> None:
    so_far = told.get(place, ())
    numbers = tuple(one for one in found if one is not None)
    is_whole = so_far is not None and len(numbers) == len(found)
    told[place] = so_far + numbers if is_whole else None


def _result(view: RowsView, drawn: Drawn | None, told: tuple[TokenLogprob, ...] | None) -> Result:
    seq, n_rows = view.rows.seq, len(view.rows.tokens)
    path = ONE_ROW if n_rows == 1 else tuple(range(n_rows))
    if told is None:
        drawn, told = Drawn(-1, error=NOT_A_NUMBER), ()
    if drawn is None:
        return Result(seq, path, (), (), told)
    if drawn.error is not None:
        return Result(seq, path, (), error=drawn.error)
    logprobs = () if drawn.logprob is None else (drawn.logprob,)
    return Result(seq, path, (drawn.token,), logprobs, told)
