"""Whether a weight is kept in blocks of which kind: one pure function of what is known of it whole,
so that every rank of every layout decides alike."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.split import Split, bounds
from aserve.models.weights.blocks import BLOCK, BLOCK_BYTES, FOUR_BITS, KEPT
from aserve.tensor.ops import BlockKind

Conversion = Literal["keep", "bf16", "int8", "q4"]
Coarsest = Literal["bf16", "int8", "q4"]
TARGETS: dict[str, BlockKind] = {"int8": "Q8_0", "q4": "Q4_1"}


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the checkpoint that become one packed weight, one under the other.

    `k` and `split` are those of the whole; `coarsest` is the least that a conversion may make of it
    (what the file has in blocks is kept all the same).
    """

    names: tuple[str, ...]
    k: int
    split: Split
    row_blocks: int = 1
    coarsest: Coarsest = "q4"


def kind_of(
    group: Group, types: Sequence[str], to: Conversion | None, layout: Layout
) -> BlockKind | None:
    """The blocks a weight is held in, or None if as numbers. `types` are the checkpoint's words.

    Blocks of the file are made into others only where that takes less memory, or where parts of one
    weight have different ones.
    """
    if to in (None, "bf16") or not _fits(group, layout):
        return None
    common = _common(types)
    order = ("bf16", "int8", "q4")
    target = TARGETS.get(to if to == "keep" else min(to, group.coarsest, key=order.index))
    if target is None or (common and BLOCK_BYTES[common] <= BLOCK_BYTES[target]):
        return common
    return target


def _fits(group: Group, layout: Layout) -> bool:
    """Whether every sum and every share is of whole blocks.

    In exact numerics shares are of whole row blocks, so that the layout makes no difference; fast
    numerics may cut elsewhere, and then the numbers are rounded once more.
    """
    if group.k % (BLOCK * group.row_blocks):
        return False
    if group.split.dim == 0:
        return True
    ranks = range(Grid(layout).tp)
    cuts = [cut for rank in ranks for cut in bounds(group.split, group.k, layout, rank)]
    return all(cut % BLOCK == 0 for cut in cuts)


def _common(types: Sequence[str]) -> BlockKind | None:
    """The one kind that can hold all parts exactly as their kinds do."""
    kinds = {KEPT.get(name) for name in types}
    if len(kinds) == 1:
        return kinds.pop()
    return "Q4_1" if kinds <= FOUR_BITS else None
