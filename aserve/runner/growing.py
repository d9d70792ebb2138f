"""Growing trees of drafts level by level, with a drafter's own KV (Li et al. 2024, "EAGLE-2").

The KV of a sequence's known tokens lies where its pages say, in a pool of the drafter's own that
has as many pages as the target's; that of drafted nodes lies in pages behind those, which are
written anew in every step. So a draft takes no page that the plan did not give.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.core.message import Drafting
from aserve.core.tree import Draft
from aserve.tensor.ops import Attend, KvLayer, Ops, Tree
from aserve.tensor.tree import Beam, Pool, Top, Trees

Ints = npt.NDArray[np.int32]
Next = Callable[[Beam, Attend], Top]  # runs the nodes of a beam; what may follow each of them


def pages_below(page_size: int, most: Drafting) -> int:
    """Of one sequence, for what it has in its last page and the nodes of a draft up to `most`."""
    nodes = max(1, most.topk * (most.depth - 1))
    return -(-(page_size - 1 + nodes) // page_size)


class Scratch:
    """The pages from `first` on in `layers`, `each` of them for one sequence of a call."""

    def __init__(
        self, ops: Ops, layers: Sequence[KvLayer], first: int, each: int, page_size: int
    ) -> None:
        self.page_size = page_size
        self._ops, self._layers = ops, layers
        self._first, self._each = first, each
        self._sequences_max = (len(layers[0].k_PSHD) - first) // each
        self._in_page: Ints = np.arange(page_size, dtype=np.int32)

    @property
    def pages_before(self) -> int:
        """Of plans."""
        return self._first

    @property
    def pages_each(self) -> int:
        """Of one sequence of a call."""
        return self._each

    def last_page(self, n: int) -> int:
        """Of the n-th sequence of a call."""
        return self._first + self._each * (n + 1) - 1

    def below(self, table_NP: Ints, lengths_N: Ints) -> "Below":
        """Room for trees below so many tokens with KV each: what the last page of a sequence has is
        copied. `table_NP` has a column for the page behind the last one."""
        n, size = len(lengths_N), self.page_size
        assert n <= self._sequences_max, (n, self._sequences_max)
        own: Ints = self._first + self._each * np.arange(n, dtype=np.int32)
        pages_N, used_N = np.divmod(lengths_N, size)
        rows = np.arange(n)
        partial = table_NP[rows, pages_N]
        places = self._in_page if used_N.any() else self._in_page[:0]
        slots_from, slots_to = ((p[:, None] * size + places).ravel() for p in (partial, own))
        for layer in self._layers if len(slots_from) else ():
            self._ops.kv_move(layer, torch.from_numpy(slots_from), torch.from_numpy(slots_to))
        whole = table_NP.shape[1] - 1 + self._each
        table: Ints = np.zeros((n, whole), dtype=np.int32)
        table[:, : table_NP.shape[1]] = table_NP
        at_NE = pages_N[:, None] + np.arange(self._each)
        table[rows[:, None], at_NE] = own[:, None] + np.arange(self._each, dtype=np.int32)
        return Below(table, lengths_N, own * size + used_N)


class Below:
    """N trees below their sequences: the attention of each level, in order."""

    def __init__(self, table_NP: Ints, lengths_N: Ints, slots_N: Ints) -> None:
        self._table = torch.from_numpy(table_NP)
        self._lengths_N, self._slots_N = lengths_N, slots_N
        self._paths_RL: Ints = np.zeros((len(lengths_N), 0), dtype=np.int32)

    def level(self, beam: Beam) -> Attend:
        """Of the nodes of `beam`, a level below those of the last call. Their places come after
        those of all levels above."""
        n, width = beam.rows_NW.shape
        depth = self._paths_RL.shape[1]
        first = depth * width
        places_NW: Ints = np.tile(np.arange(first, first + width, dtype=np.int32), (n, 1))
        tree = None
        if width > 1:  # else all before a node are on its path
            above_RL = self._paths_RL[beam.rows_NW.numpy().ravel()]
            self._paths_RL = np.concatenate((above_RL, places_NW.reshape(-1, 1)), axis=1)
            ends = np.arange(0, (n * width + 1) * (depth + 1), depth + 1, dtype=np.int32)
            tree = Tree(torch.from_numpy(ends), torch.from_numpy(self._paths_RL.ravel()))
        else:
            self._paths_RL = np.zeros((n, depth + 1), dtype=np.int32)
        slots_NW = self._slots_N[:, None] + places_NW
        positions_T = np.repeat(self._lengths_N + np.int32(depth), width)
        return Attend(
            slots_T=torch.from_numpy(slots_NW.ravel()),
            positions_T=torch.from_numpy(positions_T),
            page_table_NP=self._table,
            row_start_M=torch.arange(0, n * width + 1, width, dtype=torch.int32),
            kv_len_N=torch.from_numpy(self._lengths_N + np.int32(first + width)),
            tree=tree,
        )


def grow(trees: Trees, top: Top, below: Below, size: Drafting, after: Next) -> list[Draft]:
    """Drafts of at most `size`. `top` is what may follow each of N sequences; its K is the width of
    every level, and `after` gives as many."""
    n, width = top.tokens_RK.shape
    depth = min(size.depth, size.tokens)
    pool = Pool.empty(n, width + (depth - 1) * width * width)
    beam = trees.expand(pool, top)
    for _ in range(1, depth):
        top = after(beam, below.level(beam))
        beam = trees.expand(pool, top, beam, width)
    return trees.select(pool, [size.tokens] * n).each()


def spread(x_N: Tensor, width: int) -> Tensor:
    """[N * width]: what holds for a tree, for each node of a level."""
    return x_N if width == 1 else x_N.repeat_interleave(width)
