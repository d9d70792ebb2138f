"""What the leader of a legible attention group says of its rows: draws, accepted paths, drafts."""

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np

from aserve.core.message import GRAMMAR_FAULT, Drafting, Result, TokenLogprob
from aserve.core.replica import RowsView
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints
from aserve.testing.drafts import Guess, draft

BROKE = f"{GRAMMAR_FAULT}: the rule broke"
NOTHING_BEFORE = "nothing was drawn before this row"


@dataclasses.dataclass(frozen=True)
class Asks:
    """Rows (in group order) whose scores are needed, under which key, and where each view's start.

    A view's are first its prompt rows, then its drawn rows.
    """

    rows: list[int]
    keys: Ints
    starts: list[tuple[int, int]]  # of prompt rows, of drawn rows


class Drawer:
    """Knows how a row is drawn and what to guess next. Between steps it keeps the text of each
    sequence, for rows that are planned before their token is committed.
    """

    def __init__(self, vocab: int, guess: Guess) -> None:
        self._vocab = vocab
        self._guess = guess
        self._texts: dict[int, list[int] | None] = {}  # None: a draw failed, the text is over

    def drop(self, seq: int) -> None:
        self._texts.pop(seq, None)

    def last(self, seq: int) -> int:
        """The last token drawn, or any, where there is none: nobody will look at the row."""
        text = self._texts[seq]
        return text[-1] if text else 0

    def text(self, view: RowsView) -> list[int]:
        """All tokens of a sequence up to the last draw, also those that only its rank knows yet."""
        state = view.state
        prompt = state.tokens[: state.prompt_len]
        return prompt + (self._texts.get(state.seq) or [])

    def _text(self, view: RowsView) -> list[int] | None:
        """What was generated before the draw of these rows; None: the draw before failed.

        The state may be ahead of the rows, by commits of plans that are yet to be computed.
        """
        state = view.state
        end = view.start + (1 if view.rows.parents else view.n_rows)
        known = state.tokens[state.prompt_len : end]
        text = self._texts.setdefault(view.rows.seq, known)
        if text is not None:
            assert text[: len(known)] == known, (view.rows.seq, text, known)
            assert len(text) == end - state.prompt_len, view.rows.seq
        return text

    def asks(self, views: Sequence[RowsView]) -> Asks:
        rows: list[int] = []
        keys: list[int] = []
        starts: list[tuple[int, int]] = []
        first = 0
        for view in views:
            prompt_start = len(rows)
            n_prompt = prompt_rows(view)
            rows += range(first, first + n_prompt)
            keys += [0] * n_prompt
            starts.append((prompt_start, len(rows)))
            positions = view.positions()
            for row in drawn_rows(view):
                rows.append(first + row)
                keys.append(model.score_key(view.state.sampling, positions[row] + 1))
            first += view.n_rows
        return Asks(rows, np.array(keys, dtype=np.uint64), starts)

    def results(
        self, views: Sequence[RowsView], asks: Asks, scores_RV: Ints, drafting: Drafting
    ) -> tuple[Result, ...]:
        made: list[Result] = []
        for view, (prompt_start, drawn_start) in zip(views, asks.starts, strict=True):
            told = tuple(
                model.told(
                    view.state.tokens[view.start + row + 1],
                    scores_RV[prompt_start + row],
                    view.state.sampling.prompt_logprobs,
                )
                for row in range(prompt_rows(view))
            )
            result = self._result(view, scores_RV[drawn_start:], told)
            if drafting.tokens and result.tokens:
                tokens, parents = self._drafted(view, result.tokens, drafting)
                result = msgspec.structs.replace(result, draft_tokens=tokens, draft_parents=parents)
            made.append(result)
        return tuple(made)

    def _result(self, view: RowsView, scores_RV: Ints, told: tuple[TokenLogprob, ...]) -> Result:
        state, seq = view.state, view.rows.seq
        if not view.rows.sample:
            return Result(seq, tuple(range(view.n_rows)), (), (), told)
        text = self._text(view)
        if text is None:
            return Result(seq, tuple(range(view.n_rows)), (), error=NOTHING_BEFORE)
        walk = Walk(view, text)
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        for place in walk.places():
            if model.broken(state.sampling, walk.generated):
                if not tokens:
                    self._texts[seq] = None
                    return Result(seq, tuple(range(view.n_rows)), (), error=BROKE)
                walk.path.pop()  # its token is the last that may be said
                break
            values = scores_RV[place]
            mask = model.allowed(state.sampling, walk.generated, self._vocab)
            token = model.best(values, mask)
            tokens.append(token)
            if state.sampling.logprobs >= 0:
                logprobs.append(model.told(token, values, state.sampling.logprobs))
            walk.step(token)
        text += tokens
        return Result(seq, tuple(walk.path), tuple(tokens), tuple(logprobs), told)

    def _drafted(
        self, view: RowsView, tokens: Sequence[int], drafting: Drafting
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        state = view.state
        n_generated = len(self._texts[state.seq] or ())
        random = Random(model.seed_numbers(state.sampling.seed, state.prompt_len, n_generated))
        right = self._guess(state.seq, n_generated)
        return draft(random, right, drafting, self._vocab)


class Walk:
    """Down a tree of rows, from row to the row whose token was drawn there."""

    def __init__(self, view: RowsView, generated: Sequence[int]) -> None:
        self._rows = view.rows
        self.generated = list(generated)
        # A chain is known tokens: all of it is kept, and its last row draws.
        n_known = 1 if view.rows.parents else view.n_rows
        self.path = list(range(n_known))
        self._at: int | None = n_known - 1

    def places(self) -> Iterator[int]:
        """Which of the drawn rows is next, while the walk goes on."""
        while self._at is not None:
            yield self._at if self._rows.parents else 0

    def step(self, token: int) -> None:
        self.generated.append(token)
        children = [
            row
            for row, parent in enumerate(self._rows.parents)
            if parent == self._at and self._rows.tokens[row] == token
        ]
        self._at = children[0] if children else None
        self.path += children[:1]


def prompt_rows(view: RowsView) -> int:
    """Rows that predict a prompt token whose logprob is wanted: the first ones."""
    if view.state.sampling.prompt_logprobs < 0:
        return 0
    return max(0, min(view.kv_len, view.state.prompt_len - 1) - view.start)


def drawn_rows(view: RowsView) -> range:
    if not view.rows.sample:
        return range(0)
    return range(view.n_rows) if view.rows.parents else range(view.n_rows - 1, view.n_rows)
