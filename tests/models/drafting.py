"""Texts that are known beforehand, served to a drafter step by step: what it foresees of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.core.message import Admit, Drafting, Rows, Sampling
from aserve.core.replica import RowsView, SequenceState
from aserve.core.tree import Draft, row_parents
from aserve.runner.drafter import Drafter, Kept

POISON = torch.nan


class Told:
    """A sequence whose text and features are given: row p has feature p, and ids[p + 1] follows."""

    def __init__(
        self, seq: int, ids: Sequence[int], features_TF: Tensor, sampling: Sampling | None = None
    ) -> None:
        self.seq, self.ids, self.features_TF = seq, list(ids), features_TF.float()
        admit = Admit(seq, tuple(ids[:1]), 1, 0, (), sampling or Sampling(temperature=0.0))
        self.state = SequenceState(admit)
        self.kv_len = 0  # rows that stayed
        self.draft = Draft((), ())

    def follow(self, draft: Draft) -> list[int]:
        """The rows of a draft, behind its root, that the text takes."""
        path, at = [0], self.kv_len
        parents = row_parents(draft)
        tokens = (self.ids[at], *draft.tokens)
        while True:
            wanted = self.ids[at + len(path)] if at + len(path) < len(self.ids) - 1 else -1
            child = next(
                (
                    row
                    for row in range(path[-1] + 1, len(parents))
                    if parents[row] == path[-1] and tokens[row] == wanted
                ),
                None,
            )
            if child is None:
                return path
            path.append(child)

    def rows(self, tokens: Sequence[int], parents: Sequence[int], page_size: int) -> RowsView:
        rows = Rows(self.seq, self.kv_len, tuple(tokens), tuple(parents), True, ())
        return RowsView(self.state, rows, 0, page_size)


class Serving:
    """Steps over some sequences, each with the rows that are asked for, as a runner reports them.

    Pages come from `pages`, in that order.
    """

    def __init__(self, drafter: Drafter, names: Sequence[str], page_size: int, pages: list[int]):
        self.drafter, self.names, self.page_size = drafter, tuple(names), page_size
        self.pages = pages

    @torch.inference_mode()
    def step(
        self, rows: Sequence[tuple[Told, int]], drafting: Drafting, draws: bool = True
    ) -> list[int]:
        """(sequence, n) prefills n rows of its text, 0 verifies its draft; with how many rows that
        stayed each comes out of it. Of those that draw, drafts are kept."""
        kept, features, first = [], [], 0
        for told, count in rows:
            draft = told.draft if count == 0 else Draft((), ())
            path = told.follow(draft) if count == 0 else list(range(count))
            n_rows = count or 1 + len(draft.tokens)
            self._give_pages(told, told.kv_len + n_rows)
            at = told.kv_len
            tokens = told.ids[at : at + count] if count else [told.ids[at], *draft.tokens]
            view = told.rows(tokens, () if count else row_parents(draft), self.page_size)
            beside = torch.full((n_rows, told.features_TF.shape[1]), POISON)
            beside[path] = told.features_TF[at : at + len(path)]
            features.append(beside)
            follow = tuple(told.ids[at + 1 : at + 1 + len(path)])
            kept.append(Kept(view, first, tuple(path), follow, draws))
            first += n_rows
        whole = torch.cat(features)
        parts = whole.chunk(len(self.names), dim=1)
        seen = {name: part.contiguous() for name, part in zip(self.names, parts, strict=True)}
        drafts = self.drafter.draft(kept, seen, drafting)
        for (told, _), one, draft in zip(rows, kept, drafts, strict=True):
            told.kv_len += len(one.path)
            told.draft = draft
        return [len(one.path) for one in kept]

    def _give_pages(self, told: Told, length: int) -> None:
        while len(told.state.pages) * self.page_size < length:
            told.state.pages.append(self.pages.pop())
