"""From the last hidden states of a step to the results of its rows.

Every rank of the last stage takes part with its columns of the vocabulary; the leader of a DP group
draws for it. Which rows need logits follows from the plan, so all ranks know of all.

A tree is drawn from its root down the one path that the draws themselves choose: at each row with
what its own path makes of penalties, bans and grammar, as if the tokens before it had come one by
one. So a text does not depend on what was drafted, and rows off the path cost no draw.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from aserve.core.message import Result, TokenLogprob
from aserve.core.replica import RowsView
from aserve.core.verdict import known_rows
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


class Walk:
    """The draws of one sequence's rows: one below known tokens, and down a tree as many as the
    draft foresaw, and one more.

    The next one is of the token for `position`, by the logits at `place` of the group's.
    """

    __slots__ = ("_first_place", "drawn", "error", "path", "place", "position", "view")

    def __init__(self, view: RowsView, first_place: int) -> None:
        n_known = known_rows(view.rows)
        self.view = view
        self.path = ONE_ROW if n_known == 1 else tuple(range(n_known))
        self.position = view.start + n_known
        self.place = self._first_place = first_place
        self.drawn: list[Drawn] = []
        self.error: str | None = None

    def take(self, drawn: Drawn) -> bool:
        """Note a draw; whether there is another one, below a draft that is the token drawn."""
        if drawn.error is not None:
            if self.drawn:
                # Without drafts the token before would go out first: so it does, and this row is
                # computed again, alone.
                self.path = self.path[:-1]
            else:
                self.error = drawn.error
            return False
        self.drawn.append(drawn)
        rows = self.view.rows
        below = self.path[-1]
        for row in range(below + 1, len(rows.parents)):
            if rows.parents[row] == below and rows.tokens[row] == drawn.token:
                self.path = (*self.path, row)
                self.position += 1
                self.place = self._first_place + row
                return True
        return False


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
    ) -> dict[int, Walk]:
        """By the place of its view, the draws of each that draws in this rank's group."""
        walks: dict[int, Walk] = {}
        rows: list[int] = []
        n_own = 0
        for place, view in enumerate(views):
            if not view.rows.sample:
                continue
            n_logits, end = len(view.rows.parents) or 1, last_rows[place] + 1
            rows += range(end - n_logits, end)
            if view.group == self._group:
                walks[place] = Walk(view, n_own)
                n_own += n_logits
        if not rows:
            return {}
        # All that Python does comes before the logits: the threads that make them are still awake
        # when it is their turn to draw.
        level = [(walk, self._row(walk)) for walk in walks.values()]
        logits_RV = head(rows)
        assert n_own == logits_RV.shape[0], (n_own, logits_RV.shape)
        while level:
            level = [(walk, self._row(walk)) for walk in self._sample(level, logits_RV)]
        return walks

    def _sample(
        self, level: Sequence[tuple[Walk, SampleRow | Drawn]], logits_RV: Tensor
    ) -> list[Walk]:
        """One draw of each walk; those that go on."""
        rows: list[SampleRow] = []
        places: list[int] = []
        for walk, row in level:
            if isinstance(row, SampleRow):
                rows.append(row)
                places.append(walk.place)
        drawn: list[Drawn] = []
        for run in progressions(places):
            some = rows[len(drawn) : len(drawn) + len(run)]
            drawn += self._sampler.sample(logits_RV[run.start : run.stop : run.step], some)
        found = iter(drawn)
        going: list[Walk] = []
        for walk, row in level:
            one = row if isinstance(row, Drawn) else next(found)
            seq, position = walk.view.rows.seq, walk.position
            if walk.take(one):
                going.append(walk)
            if walk.error is not None:
                self._draws.drew(seq, position, -1)
            elif one.error is None:
                self._draws.drew(seq, position, one.token)
        return going

    def _row(self, walk: Walk) -> SampleRow | Drawn:
        view = walk.view
        if view.rows.is_lagging and self._draws.last(view.rows.seq) < 0:
            return Drawn(-1, error=NOTHING_BEFORE)
        return self._draws.row(view.state, walk.position)

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
    is_number = len(numbers) == len(found)
    told[place] = so_far + numbers if is_number and so_far is not None else None


def progressions(places: Sequence[int]) -> Iterator[range]:
    """Ascending numbers in as few ranges as it takes, in their order: so many rows are one view,
    and none is copied, for a row of logits is large."""
    start = 0
    while start < len(places):
        step = places[start + 1] - places[start] if start + 1 < len(places) else 1
        end = start + 1
        while end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        yield range(places[start], places[end - 1] + 1, step)
        start = end


def _result(view: RowsView, walk: Walk | None, told: tuple[TokenLogprob, ...] | None) -> Result:
    seq = view.rows.seq
    if told is None:
        return Result(seq, _whole(view), (), error=NOT_A_NUMBER)
    if walk is None:
        return Result(seq, _whole(view), (), (), told)
    if walk.error is not None:
        return Result(seq, walk.path, (), error=walk.error)
    tokens = tuple([one.token for one in walk.drawn])
    logprobs = tuple([one.logprob for one in walk.drawn if one.logprob is not None])
    return Result(seq, walk.path, tokens, logprobs, told)


def _whole(view: RowsView) -> tuple[int, ...]:
    return tuple(range(known_rows(view.rows)))
