"""Trees of drafts: the likeliest children, a level, building, paths, the walk, moving KV of paths.

Trees are grown eight wide and seven deep from random logits; half of the draws agree with a child.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aserve.bench import case
from aserve.bench.case import HEAD_DIM, KV_HEADS, PAGE_SIZE, Case
from aserve.core.tree import row_parents
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import KvLayer
from aserve.tensor.tree import Beam, Noise, Pool, Top, Trees, open_trees

K, DEPTH, NOISY = 8, 7, 64
CANDIDATE_BYTES = 12  # score, token, parent
BUILD_US, ACCEPT_US = 50.0, 20.0  # what 32 trees of 64 rows may take


@dataclasses.dataclass(frozen=True)
class Grown:
    """Trees of N sequences before and with their last level, and the rows that verify them."""

    levels: list[Top]
    pool: Pool
    beam: Beam
    budgets: list[int]
    row_start_M: Tensor
    parents_T: Tensor
    tokens_T: Tensor
    drawn_T: Tensor
    starts_N: Tensor

    @property
    def candidates(self) -> int:
        return self.pool.trees * self.pool.capacity

    @property
    def rows(self) -> int:
        return len(self.parents_T)


def grown(trees: Trees, n: int, tokens: int) -> Grown:
    """`n` trees of `tokens` rows each, the root among them."""
    pool, beam = Pool.empty(n, K + (DEPTH - 1) * K * K), None
    levels = []
    for level in range(DEPTH):
        logits = 3 * torch.randn(n if level == 0 else n * K, 64)
        levels.append(trees.top(logits, K))
        if level < DEPTH - 1:
            beam = trees.expand(pool, levels[-1], beam)
    assert beam is not None
    trees.expand(pool, levels[-1], beam)
    drafts = trees.select(pool, [tokens - 1] * n).each()
    parents = [parent for one in drafts for parent in row_parents(one)]
    own = [token for one in drafts for token in (0, *one.tokens)]
    drawn = torch.randint(0, 64, (n * tokens,), dtype=torch.int32)
    for row, agrees in enumerate((torch.rand(n * tokens) < 0.5).tolist()):
        if agrees and parents[row] >= 0:
            drawn[row - row % tokens + parents[row]] = own[row]
    made = [torch.tensor(values, dtype=torch.int32) for values in (parents, own)]
    row_start_M = torch.arange(n + 1, dtype=torch.int32) * tokens
    starts_N = torch.randint(0, 2000, (n,), dtype=torch.int32)
    return Grown(levels, pool, beam, [tokens - 1] * n, row_start_M, *made, drawn, starts_N)


def tree(ops: NativeOps) -> Iterator[Case]:
    """Every part of a round at one and at many sequences."""
    native, twin = open_trees("native", ops.team), open_trees("reference")

    def both(shape: str, moved: float, call: Callable[[Trees], object]) -> Case:
        return Case("tree", shape, moved, 0, lambda: call(native), lambda: call(twin))

    for n, tokens in ((1, 8), (1, 64), (32, 64)):
        some = grown(native, n, tokens)
        is_full = n * tokens == 32 * 64
        shape = f"{n}x{tokens}"
        if tokens == 64:
            logits = torch.randn(n, case.VOCAB) * 3
            yield both(f"top {K} of {n} rows", logits.nbytes, lambda t, x=logits: t.top(x, K))
            some_tops = native.top(logits, NOISY)
            noise = Noise(torch.arange(n), torch.arange(n).int(), torch.full((n,), 0.8))
            yield both(
                f"noise {NOISY} of {n} rows",
                n * (8 * (NOISY + K) + 16),
                lambda t, x=some_tops, noise=noise: t.under_noise(x, noise, K),
            )
            moved = n * K * K * (8 + CANDIDATE_BYTES)
            yield both(f"level {n}x{K}x{K}", moved, lambda t, some=some: last_level(t, some))
        moved = some.candidates * 8 + some.rows * (2 * CANDIDATE_BYTES + 4 + 12 + 8)
        build = both(f"build {shape}", moved, lambda t, some=some: built(t, some))
        yield dataclasses.replace(build, limit=BUILD_US if is_full else None)
        paths = native.paths(some.row_start_M, some.parents_T).paths
        moved = 8 * some.rows + paths.nbytes
        yield both(
            f"paths {shape}",
            moved,
            lambda t, some=some: t.paths(some.row_start_M, some.parents_T),
        )
        slots = scattered(some.rows)
        walk = both(
            f"accept {shape}",
            32 * some.rows,
            lambda t, some=some, slots=slots: walked(t, some, slots),
        )
        yield dataclasses.replace(walk, limit=ACCEPT_US if is_full else None)
        yield compaction(both, native, some, slots)


def scattered(rows: int) -> Tensor:
    """Slots of rows that are one after the other, in pages that are not."""
    pages = torch.randperm(-(-rows // PAGE_SIZE)).repeat_interleave(PAGE_SIZE)[:rows]
    return (pages * PAGE_SIZE + torch.arange(rows) % PAGE_SIZE).int()


def last_level(trees: Trees, some: Grown) -> Beam:
    some.pool.count = some.pool.capacity - K * K
    return trees.expand(some.pool, some.levels[-1], some.beam)


def built(trees: Trees, some: Grown) -> object:
    drafts = trees.select(some.pool, some.budgets)
    return drafts, trees.lay_out(some.row_start_M, some.parents_T, some.starts_N)


def walked(trees: Trees, some: Grown, slots: Tensor) -> object:
    return trees.accept(some.row_start_M, some.parents_T, some.tokens_T, some.drawn_T, slots)


def compaction(
    both: Callable[[str, float, Callable[[Trees], object]], Case],
    native: Trees,
    some: Grown,
    slots: Tensor,
) -> Case:
    """In all layers of the model."""
    shape = (-(-some.rows // PAGE_SIZE), case.LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pool = torch.zeros(shape, dtype=torch.bfloat16)
    layers = [KvLayer(*pool[:, layer].unbind(1)) for layer in range(case.LAYERS)]
    told = native.accept(some.row_start_M, some.parents_T, some.tokens_T, some.drawn_T, slots)
    assert told.from_slots_T is not None
    assert told.to_slots_T is not None
    moves = int((told.from_slots_T >= 0).sum())
    moved = max(1, 2 * moves) * case.LAYERS * 2 * KV_HEADS * HEAD_DIM * 2
    given = some.row_start_M, told.from_slots_T, told.to_slots_T
    return both(f"compact {moves} rows of {some.rows}", moved, lambda t: t.compact(layers, *given))
