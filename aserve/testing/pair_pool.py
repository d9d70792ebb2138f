"""KV of a legible drafter: of each position its token and the next, in the sequence's own slots.

It is written for rows that stay, once it is known what follows them, so nothing moves it; what the
prefix cache brings must be of the same pairs.
"""

import numpy as np

from aserve.core.message import Result
from aserve.core.planner import CacheSpec
from aserve.core.replica import RowsView
from aserve.testing.kv_pool import Look


class ForeignPair(AssertionError):
    """A drafter read KV of another text than the one that it continues."""


class PairPool:
    """`[slot]` pairs of one attention group's leader."""

    def __init__(self, cache: CacheSpec) -> None:
        self._pairs = np.full((cache.pages_total * cache.page_size, 2), -1, dtype=np.int64)

    def keep(self, view: RowsView, result: Result, text: list[int]) -> None:
        """Write the pairs of the rows kept, then read those of all of `text`."""
        if result.error is not None:
            return
        start, end = view.start, view.start + len(result.path)
        tokens = text
        if end >= len(text):  # a chunk of what is known already, after a retraction
            tokens = view.state.tokens
        slots = Look(view, 0).slots
        pairs = np.array([tokens[:end], tokens[1 : end + 1]], dtype=np.int64).T
        self._pairs[slots[start:end]] = pairs[start:]
        wrong = np.flatnonzero((self._pairs[slots[:end]] != pairs).any(1))
        if len(wrong):
            at = int(wrong[0])
            found, due = self._pairs[slots[at]].tolist(), pairs[at].tolist()
            raise ForeignPair(
                f"sequence {view.rows.seq} drafts from {found} at position {at}, not {due}"
            )
