"""Rows that a drafter has not taken in yet, while nobody asks it for drafts.

Many rows at once cost it little more than a few. What others may read, who share a prompt's pages,
does not wait: that is up to the first draw of a sequence; the rest of its pages may go to the cache
when it leaves, and is taken in before.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.core.message import Drafting
from aserve.runner.drafter import Kept

LATER_MAX = 256  # rows


class Later:
    """`kept` of several steps, each row after the other of its sequence; `seqs` have some."""

    def __init__(self) -> None:
        self.kept: list[Kept] = []
        self.seqs: set[int] = set()
        self._parts: list[list[Tensor]] = []  # of each step, as `put` was given them
        self._drawing: set[int] = set()  # sequences that have drawn before
        self._n_rows = 0  # in `_parts`

    def put(self, kept: Sequence[Kept], parts: Sequence[Tensor], drafting: Drafting) -> bool:
        """Copy what a step brings, if all of it can wait; False: it is to be taken in now."""
        waits = not drafting.tokens and len(self.kept) + len(kept) <= LATER_MAX
        for one in kept:
            seq = one.view.rows.seq
            waits &= one.is_drawn and len(one.path) == 1 and seq in self._drawing
            if one.is_drawn:
                self._drawing.add(seq)
        if waits:
            self._append(kept, [part.clone() for part in parts])
        return waits

    def _append(self, kept: Sequence[Kept], parts: list[Tensor]) -> None:
        before = self._n_rows
        self.kept += [
            dataclasses.replace(one, first_row=before + one.first_row) if before else one
            for one in kept
        ]
        self.seqs.update(one.view.rows.seq for one in kept)
        self._parts.append(parts)
        self._n_rows += len(parts[0])

    def taken_with(
        self, kept: Sequence[Kept], parts: Sequence[Tensor]
    ) -> tuple[Sequence[Kept], Sequence[Tensor]]:
        """All that waited, and a step's behind it; nothing waits then."""
        if not self.kept:
            return kept, parts
        self._append(kept, list(parts))
        return self.take()

    def take(self) -> tuple[Sequence[Kept], Sequence[Tensor]]:
        """All that waited; nothing waits then."""
        kept = self.kept
        parts = [torch.cat(of_steps) for of_steps in zip(*self._parts, strict=True)]
        self.kept, self._parts, self._n_rows = [], [], 0
        self.seqs.clear()
        return kept, parts

    def forget(self, seq: int) -> None:
        """A sequence is over: should it come again, its first draw is the first."""
        self._drawing.discard(seq)
