"""A page pool of integers, and what a sequence's rows see of it through the page table.

It remembers who wrote each slot: reading what somebody else left in a page of one's own is caught
even where the text would not show it.
"""

from collections.abc import Sequence

import numpy as np

from aserve.core.planner import CacheSpec
from aserve.core.replica import RowsView
from aserve.tensor.tokens import Rows
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints

NOBODY = -1


class ForeignRead(AssertionError):
    """A sequence read a slot of its own page that another one wrote."""


class Look:
    """The slots that one sequence's rows write and read in a step, off the page table."""

    def __init__(self, view: RowsView, own_from: int) -> None:
        size = view.page_size
        pages = np.array(view.state.pages, dtype=np.int64)
        self.seq = view.rows.seq
        self.start = view.start
        self.n_rows = view.n_rows
        self.parents = view.rows.parents
        self.own_from = own_from  # up to here the pages came from the prefix cache
        positions = np.arange(self.start + self.n_rows)
        self.slots = pages[positions // size] * size + positions % size
        self.depths = np.array(view.positions(), dtype=np.int64) - self.start

    @property
    def is_tree(self) -> bool:
        return bool(self.parents)


class IntegerPool:
    """`[layer, head, slot]` integers of one rank's share of layers and heads."""

    def __init__(self, cache: CacheSpec, layers: range, n_heads: int) -> None:
        n_slots = cache.pages_total * cache.page_size
        self._first = layers.start
        # What was never written has a value too, and not a harmless one.
        self.values: Ints = np.full((len(layers), n_heads, n_slots), 0xDEAD, dtype=np.uint64)
        self.writers = np.full(n_slots, NOBODY, dtype=np.int64)

    def move(self, seq: int, slots_from: Sequence[int], slots_to: Sequence[int]) -> None:
        """Copy all layers' entries, as if all were read before any is written."""
        self.values[:, :, list(slots_to)] = self.values[:, :, list(slots_from)]
        self.writers[list(slots_to)] = seq

    def write(self, layer: int, slots: Rows, values: Ints) -> None:
        self.values[layer - self._first][:, slots] = values

    def check(self, look: Look) -> None:
        """Whether the rows see, beyond the cached prefix, only what their sequence wrote."""
        writers = self.writers[look.slots[look.own_from :]]
        if (writers != look.seq).any():
            at = look.own_from + int(np.argmax(writers != look.seq))
            raise ForeignRead(
                f"sequence {look.seq} reads position {at} from slot {look.slots[at]}, written by "
                f"{writers[at - look.own_from]}"
            )

    def sums(self, layer: int, look: Look) -> Ints:
        """[heads, rows]: the weighted sum of what each row sees: all before `start`, its ancestors,
        itself."""
        start = look.start
        seen = self.values[layer - self._first][:, look.slots]
        if not look.is_tree:
            weighted = seen * model.WEIGHTS[: start + look.n_rows]
            if look.n_rows == 1:
                return weighted.sum(1, keepdims=True, dtype=np.uint64)
            return np.cumsum(weighted, axis=1, dtype=np.uint64)[:, start:]
        before = (seen[:, :start] * model.WEIGHTS[:start]).sum(1, dtype=np.uint64)
        sums = seen[:, start:] * model.WEIGHTS[start + look.depths]
        for row, parent in enumerate(look.parents):
            sums[:, row] += before if parent < 0 else sums[:, parent]
        return sums
