"""Trees as tests spell them, random ones, and comparing two implementations on them."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import torch
from torch import Tensor

from aserve.tensor.ops import KvLayer
from aserve.tensor.tree import Beam, Pool, Top, Trees

NAN = float("nan")


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def offsets(counts: Sequence[int]) -> Tensor:
    return ints([0, *itertools.accumulate(counts)])


def pool_of(trees: Sequence[Sequence[tuple[float, int, int]]], spare: int = 1) -> Pool:
    """Of (score, token, parent) of every candidate; trees are equally large."""
    count = len(trees[0]) if trees else 0
    pool = Pool.empty(len(trees), count + spare)
    pool.scores_NC.fill_(math.inf)  # what lies behind the candidates would win
    for n, tree in enumerate(trees):
        for place, (score, token, parent) in enumerate(tree):
            pool.scores_NC[n, place] = score
            pool.tokens_NC[n, place] = token
            pool.parents_NC[n, place] = parent
    pool.count = count
    return pool


def tops(seed: int, trees: int, k: int, depth: int, vocab: int = 50) -> list[Top]:
    """The children of every level of trees `k` wide, many of them equal."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for level in range(depth):
        rows = trees if level == 0 else trees * k
        logits = torch.randn(rows, vocab, generator=generator).mul(2).round()
        found = logits.log_softmax(-1).sort(dim=-1, descending=True, stable=True)
        made.append(Top(found.values[:, :k].contiguous(), found.indices[:, :k].int().contiguous()))
    return made


def grown(trees: Trees, levels: Sequence[Top], device: torch.device | None = None) -> Pool:
    """All levels of equally many children of each node, as many nodes in each level."""
    n, k = levels[0].logprobs_RK.shape
    pool = Pool.empty(n, k + (len(levels) - 1) * k * k, device)
    beam: Beam | None = None
    for top in levels:
        beam = trees.expand(pool, top, beam)
    return pool


def assert_same(one: object, other: object) -> None:
    """Field by field and bit by bit; NaN is NaN."""
    assert type(one) is type(other)
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        mine, twins = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(mine, Tensor):
            assert mine == twins, field.name
            continue
        assert mine.dtype == twins.dtype, field.name
        torch.testing.assert_close(mine.cpu(), twins, rtol=0, atol=0, equal_nan=True)


def parents_of(size: int) -> st.SearchStrategy[list[int]]:
    return st.tuples(
        *(st.integers(-1 if row == 0 else 0, max(row - 1, -1)) for row in range(size))
    ).map(list)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Of several trees: parents, tokens and what was drawn, one after the other."""

    row_start_M: Tensor
    parents_T: Tensor
    tokens_T: Tensor
    drawn_T: Tensor
    each: tuple[tuple[list[int], list[int], list[int]], ...]


@st.composite
def random_rows(draw: st.DrawFn, size_max: int = 12) -> Rows:
    """Tokens are few, so that walks go deep and siblings are equal; some draws failed."""
    sizes = draw(st.lists(st.integers(0, size_max), max_size=5))
    each = []
    for size in sizes:
        tokens = st.lists(st.integers(0, 2), min_size=size, max_size=size)
        drawn = st.lists(st.sampled_from([0, 0, 1, 1, 2, 2, -1]), min_size=size, max_size=size)
        each.append((draw(parents_of(size)), draw(tokens), draw(drawn)))
    flat = [ints([one for tree in each for one in tree[part]]) for part in range(3)]
    return Rows(offsets(sizes), *flat, tuple(each))


scores = st.one_of(
    st.integers(-6, 0).map(lambda score: score / 2),
    st.sampled_from([NAN, -math.inf, math.inf, -0.0, 0.0, 1.5]),
)


@st.composite
def random_pools(draw: st.DrawFn, count_max: int = 40) -> Pool:
    """Any scores: also children better than their parents, and no numbers."""
    count = draw(st.integers(0, count_max))
    trees = [
        [
            (draw(scores), draw(st.integers(0, 9)), draw(st.integers(-1, place - 1)))
            for place in range(count)
        ]
        for _ in range(draw(st.integers(0, 3)))
    ]
    return pool_of(trees, draw(st.integers(1, 2)))


def kv_layers(page_size: int, pages: int = 6, layers: int = 3) -> list[KvLayer]:
    """Pages of all layers in one pool, as the store has them; every row another number."""
    shape = (pages, layers, 2, page_size, 2, 8)
    pool = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    return [KvLayer(*pool[:, layer].unbind(1)) for layer in range(layers)]
