"""Trees of drafts as tensors: growing them level by level, choosing their nodes, laying out their
rows, walking what the model's own draws keep of them, and moving the KV of that.

For N sequences at once. Candidates, nodes and rows are numbered so that parents come before
children; aserve/core/tree.py has the rules in tuples. Of equals the lower index comes first, and
NaN after every number, so that all of it is the same on every processor.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from aserve.core.message import Drafting
from aserve.core.tree import Draft
from aserve.tensor.ops import KvLayer, Ops, Tree

if TYPE_CHECKING:
    from aserve import _native

MASK_BITS = 64  # of a word


@dataclasses.dataclass(frozen=True, slots=True)
class Top:
    """The K likeliest tokens of R rows, best first. A row without K finite logits goes on with
    tokens 0, 1, ... by place and scores of -inf; one with NaN, +inf or nothing finite has only
    those, and NaN."""

    logprobs_RK: Tensor  # float32
    tokens_RK: Tensor  # int32


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """What the target's draws of R tokens will be made with (core/noise.py)."""

    seeds_R: Tensor  # int64, the bits of a u64
    positions_R: Tensor  # int32: where each token will stand
    temperatures_R: Tensor  # float32; below 1e-5 there is no noise


@dataclasses.dataclass(slots=True)
class Pool:
    """The candidates of N trees, `count` of them each, level after level.

    Scores are sums of log-probabilities down the path; `parents_NC` are places among the
    candidates of the same tree, -1 the root. Who drafts by other means fills it himself.
    """

    scores_NC: Tensor  # float32, contiguous as the others
    tokens_NC: Tensor  # int32
    parents_NC: Tensor  # int32
    count: int = 0

    @classmethod
    def empty(cls, trees: int, capacity: int, device: torch.device | None = None) -> "Pool":
        """For levels of beam W and K children each: K, and W * K for each level but the first."""
        shape = (trees, capacity)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )

    @property
    def trees(self) -> int:
        return self.scores_NC.shape[0]

    @property
    def capacity(self) -> int:
        return self.scores_NC.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Beam:
    """The W best of one level of N trees, best first; int32.

    `rows_NW` says under which row of `Top` each stands: whose hidden state and KV it continues.
    """

    places_NW: Tensor  # in the pool
    tokens_NW: Tensor
    rows_NW: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """The chosen nodes of N trees, tree after tree: those of tree n are `starts[n]:starts[n + 1]`.

    `parents_D` count from a tree's first node, -1 is the root: what `Result` says of a draft.
    """

    starts: tuple[int, ...]
    tokens_D: Tensor  # int32
    parents_D: Tensor  # int32
    scores_D: Tensor  # float32

    def each(self) -> list[Draft]:
        """As tuples; waits for a device."""
        tokens, parents = self.tokens_D.tolist(), self.parents_D.tolist()
        return [
            Draft(tuple(tokens[begin:end]), tuple(parents[begin:end]))
            for begin, end in itertools.pairwise(self.starts)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Of the T rows of N trees: where each stands, which it sees, who is below and beside it.

    Bit `r % 64` of word `r // 64` of `mask_TW` is set for each row r of the same tree on a row's
    path, itself included. `first_child_T` and `next_sibling_T` are rows of the same tree, the
    lowest first, -1 where there is none.
    """

    positions_T: Tensor  # int32, start + depth
    mask_TW: Tensor  # int64
    first_child_T: Tensor  # int32
    next_sibling_T: Tensor  # int32


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """What draws keep of N trees; int32. Behind the path of a tree everything is -1.

    From a tree's first row on `path_T` has the rows that stay and `kept_T` the token drawn at each
    of them: the accepted drafts, and last the token that comes next, which is `next_N` (-1 where
    nothing could be drawn at the root). KV moves from `from_slots_T` to `to_slots_T`, pair by pair,
    where these are not -1; they are None if no slots were given.
    """

    path_T: Tensor
    kept_T: Tensor
    lengths_N: Tensor
    next_N: Tensor
    from_slots_T: Tensor | None
    to_slots_T: Tensor | None

    def each(self, row_start_M: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(path, tokens) of each tree, as in `Result`; waits for a device."""
        path, kept = self.path_T.tolist(), self.kept_T.tolist()
        spans = zip(row_start_M.tolist(), self.lengths_N.tolist(), strict=False)
        return [
            (tuple(path[begin : begin + length]), tuple(kept[begin : begin + length]))
            for begin, length in spans
        ]


class Trees(Protocol):
    """Row offsets are int32 with N + 1 entries, from 0 to T. ValueError where shapes do not fit;
    on a CPU also where a parent is not before its child or a slot is outside the pages."""

    def top(self, logits_RV: Tensor, k: int) -> Top:
        """By log softmax of float32 logits; `k` is at most the vocabulary."""
        ...

    def under_noise(self, top: Top, noise: Noise, k: int) -> Top:
        """The first `k` of each row in the order in which the target would draw them, were its
        logits these: by log-probability / temperature + noise of the token, which is one of the
        target's vocabulary. Scores are the log softmax of that over the row.

        With the same noise a draft proposes what will be drawn, not only what is likely.
        """
        ...

    def expand(self, pool: Pool, top: Top, beam: Beam | None = None, width: int = 0) -> Beam:
        """Add the children of a level to the pool, and choose the `width` (0: K) best of them.

        `top` has N rows without a beam, and else one for each of its nodes, in their order: rows
        n * W to n * W + W - 1 are those of tree n.
        """
        ...

    def select(self, pool: Pool, budgets: Sequence[int]) -> Drafts:
        """The `budgets[n]` best candidates of tree n, all if there are fewer, in their order.

        None counts for more than its parent, so whatever the scores it does not come without it.
        """
        ...

    def lay_out(self, row_start_M: Tensor, parents_T: Tensor, starts_N: Tensor) -> Layout:
        """`parents_T` are those of `Rows`: rows of the same tree, -1 at a root. `starts_N`, int32,
        are the positions of the roots."""
        ...

    def paths(self, row_start_M: Tensor, parents_T: Tensor) -> Tree:
        """What attention takes. Rows of a tree that is a chain have no path: they go by position.
        On a GPU this waits."""
        ...

    def accept(
        self,
        row_start_M: Tensor,
        parents_T: Tensor,
        tokens_T: Tensor,
        drawn_T: Tensor,
        slots_T: Tensor | None = None,
    ) -> Accepted:
        """Walk from each root to the first child with the token that was drawn, and on from there.

        `drawn_T` is what the model drew at each row, -1 where there was nothing to draw: such a
        row is not entered. `slots_T` is where each row's KV is.
        """
        ...

    def compact(
        self, layers: Sequence[KvLayer], starts_M: Tensor, slots_from: Tensor, slots_to: Tensor
    ) -> None:
        """Move rows of KV in all layers, pair by pair in their order; pairs of -1 are left out.

        The pairs of sequence n are `starts_M[n]:starts_M[n + 1]`. None reads what one before it has
        written, and sequences share no slots: so it is with `Accepted` and with `Replica`. The same
        list object is taken to hold the same layers as last time.
        """
        ...


def nodes_of(size: Drafting) -> int:
    """Of a whole tree: of each level the `topk` best go on, each with as many children."""
    depth, width = min(size.depth, size.tokens), size.topk
    return min(size.tokens, width + (depth - 1) * width * width)


def children_of(pool: Pool, top: Top, beam: Beam | None) -> tuple[int, int]:
    """How many nodes of a tree `top` has children of, and how many of each."""
    rows, k = top.logprobs_RK.shape
    beams = 1 if beam is None else beam.places_NW.shape[1]
    if rows != pool.trees * beams or top.tokens_RK.shape != (rows, k) or k < 1:
        raise ValueError(
            f"children of {tuple(top.logprobs_RK.shape)}, tokens of {tuple(top.tokens_RK.shape)} "
            f"for {beams} nodes each of {pool.trees} trees"
        )
    return beams, k


def noise_shape(top: Top, noise: Noise, k: int) -> tuple[int, int]:
    """Rows, and tokens of each."""
    rows, m = top.logprobs_RK.shape
    parts = noise.seeds_R, noise.positions_R, noise.temperatures_R
    if top.tokens_RK.shape != (rows, m) or any(x.shape != (rows,) for x in parts):
        raise ValueError(f"noise of {[tuple(x.shape) for x in parts]} for {rows} rows")
    if not 1 <= k <= m:
        raise ValueError(f"{k} of {m} tokens")
    return rows, m


def require_room(pool: Pool, children: int, width: int) -> int:
    """Checks and returns the width of a beam of so many more candidates."""
    if pool.count + children > pool.capacity:
        raise ValueError(f"{children} more for {pool.count} of {pool.capacity} candidates")
    if not 1 <= width <= children:
        raise ValueError(f"a beam of {width} of {children} candidates")
    return width


def budgets_of(pool: Pool, budgets: Sequence[int]) -> tuple[int, ...]:
    """Where the nodes of each tree will begin."""
    if len(budgets) != pool.trees or min(budgets, default=0) < 0:
        raise ValueError(f"budgets {tuple(budgets)} for {pool.trees} trees")
    if max(budgets, default=0) > pool.count:
        budgets = [min(budget, pool.count) for budget in budgets]
    return (0, *itertools.accumulate(budgets))


def trees_of(ops: Ops) -> Trees:
    """The trees that go with `ops` that are open."""
    team = getattr(ops, "team", None)
    return open_trees("reference" if team is None else "native", team)


def open_trees(kernels: str, team: "_native.Team | None" = None) -> Trees:
    """The trees that go with `open_ops(kernels, ...)`; `kernels` is native or reference."""
    if kernels == "native":
        from aserve.tensor.tree_native import NativeTrees

        assert team is not None
        return NativeTrees(team)
    from aserve.tensor.tree_reference import ReferenceTrees

    return ReferenceTrees()
