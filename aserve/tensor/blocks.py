"""A decoder's blocks in one call each: what stands between two collectives, or a whole stage.

The same bits as the calls of `Ops` that they stand for; those are their twin, and the way of
everything that blocks do not cover.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from aserve.core.message import Drafting
from aserve.tensor.ops import Attend, KvLayer, Linear, Ops
from aserve.tensor.rope import RopeTable
from aserve.tensor.tree import Noise


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionPart:
    """Norm, joint projection, q and k norms (both or neither), rotation, KV write, attention, `out`
    over its row blocks. Without a norm it is a part of something else."""

    norm_H: Tensor | None
    qkv: Linear
    out: Linear
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class MlpPart:
    """Norm, gate and up, gated activation, `down` over its row blocks. Without a norm only the
    calls that take normed rows will do."""

    norm_H: Tensor | None
    gate_up: Linear
    down: Linear
    eps: float


@dataclasses.dataclass(frozen=True, slots=True)
class DraftPart:
    """The layer of a draft head and the head behind it. `norms_H` are of the embedding and of the
    hidden row, which attention then takes side by side; None: it takes hidden rows as they come.
    `norm_H` is that before the head, if there is one.

    `table` are the embeddings, `fc` makes a row of one of them beside a hidden row where there are
    no norms, and `ids_V` (int32) are the target's tokens; None: the same.
    """

    norms_H: tuple[Tensor, Tensor] | None
    attention: AttentionPart  # without a norm
    mlp: MlpPart
    norm_H: Tensor | None
    head: Linear
    table: Tensor | Linear
    fc: Linear | None = None
    ids_V: Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class DraftRoots:
    """N sequences that trees are to grow below, int32 where nothing else is said.

    `hidden_NH` and `logits_NV` (float32) are of their last rows, `lengths_N` what they have of KV;
    tables have a column for the page behind that. KV of nodes goes to `pages_each` pages from
    `first_page` + n * `pages_each` on. With noise the target's draws are foreseen among the `most`
    likeliest tokens.
    """

    hidden_NH: Tensor
    logits_NV: Tensor
    page_table_NP: Tensor
    lengths_N: Tensor
    first_page: int
    pages_each: int
    noise: Noise | None = None
    most: int = 0


class BlockStep(Protocol):
    """What the layers share in one step, as the blocks that made it take it."""

    @property
    def n_rows(self) -> int: ...


class AttentionBlock(Protocol):
    """Takes x and what is still to be added to it, if anything; gives x + added and the rest."""

    def whole(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        """(x, [T, H]), the bias included."""
        ...

    def parts(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        """(x, [row blocks, T, H]), as `Ops.linear_parts` gives them."""
        ...

    def attended(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        """(x, [T, heads * dim]): what the output projection is to take."""
        ...


class MlpBlock(Protocol):
    def whole(self, x_TH: Tensor, added_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + added, [T, H]), the bias included."""
        ...

    def parts(self, x_TH: Tensor, added_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(x + added, [row blocks, T, H])."""
        ...

    def gated(self, normed_TH: Tensor) -> Tensor:
        """[T, H] of normed rows."""
        ...

    def gated_parts(self, normed_TH: Tensor) -> Tensor:
        """[row blocks, T, H] of normed rows."""
        ...


class Stack(Protocol):
    """All layers of a stage that is one rank."""

    def __call__(self, x_TH: Tensor, kv: Sequence[KvLayer], step: BlockStep) -> Tensor:
        """[T, H], after the final norm if there is one. `kv[i]` belongs to layer i."""
        ...

    def capturing(
        self, x_TH: Tensor, kv: Sequence[KvLayer], step: BlockStep, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(the same, the [T, H] that enters each of `layers`), which ascend."""
        ...


class DraftBlock(Protocol):
    def __call__(
        self,
        embedded_TH: Tensor | None,
        hidden_TH: Tensor,
        kv: KvLayer,
        step: BlockStep,
        ends: tuple[Tensor, BlockStep] | None,
    ) -> tuple[Tensor, Tensor]:
        """([N, H], logits [N, V]) of all rows, or of those rows (int64) that see what the other
        step says. KV is written of all."""
        ...

    def grow(
        self, kv: KvLayer, rope: RopeTable, roots: DraftRoots, size: Drafting
    ) -> tuple[Tensor, Tensor]:
        """(tokens, parents), both int32 [N, nodes]: trees of at most `size`, as `Drafts` has them,
        with as many nodes as there can be. `rope` is for all places that they may have."""
        ...


class Blocks(Protocol):
    def step(self, attend: Attend, rope: RopeTable) -> BlockStep:
        """For the rows at `attend.positions_T`. Use it while those tensors are as they are."""
        ...

    def attention(self, part: AttentionPart) -> AttentionBlock: ...

    def mlp(self, part: MlpPart) -> MlpBlock: ...

    def draft(self, part: DraftPart) -> DraftBlock: ...

    def stack(
        self,
        layers: Sequence[tuple[AttentionBlock, MlpBlock]],
        norm_H: Tensor | None,
        eps: float,
    ) -> Stack:
        """`norm_H` is that behind the model's last layer; None: the stage hands on its sums."""
        ...


def blocks_of(ops: Ops) -> Blocks | None:
    """Those that come with `ops`; None: it has none, or was opened without."""
    return getattr(ops, "blocks", None)
