"""Trees of drafts: the native kernels and their twin, on the golden case, at edges, at random."""

import math
from random import Random

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from aserve.core.message import Drafting
from aserve.core.tree import is_path, malformed, row_parents
from aserve.tensor.ops import paths_of, tree_of
from aserve.tensor.tree import Drafts, Pool, Top, Trees, open_trees
from aserve.tensor.tree_native import NativeTrees
from aserve.tensor.tree_reference import ReferenceTrees
from tests.tensor.tree_cases import (
    NAN,
    Rows,
    assert_same,
    grown,
    ints,
    kv_layers,
    offsets,
    pool_of,
    random_pools,
    random_rows,
    tops,
)

TWIN = ReferenceTrees()
MANY = hypothesis.settings(
    max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


# Two trees of eight rows of beams four wide and four deep; what each node's place means is in
# `golden_levels`. The tables are those that another engine's kernels give for these trees.
GOLDEN_PARENTS = [[-1, 0, 0, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 1, 1, 3, 6]]
GOLDEN = {
    "positions": [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14],
    "first_child": [1, 3, 4, 5, 6, 7, -1, -1, 1, 2, -1, 6, -1, -1, 7, -1],
    "next_sibling": [-1, 2, *[-1] * 6, -1, -1, 3, 4, 5, -1, -1, -1],
}


def golden_levels() -> list[Top]:
    """Log-probabilities with which the two golden trees are the best eight rows.

    Whatever is not said is far worse. Beams are best first, so row 0 of a tree is its best node.
    """
    levels = []
    good = {
        # (level, tree, beam): children by place
        (0, 0, 0): [-1.0, -1.5], (1, 0, 0): [-0.5], (1, 0, 1): [-0.25],
        (2, 0, 0): [-0.5], (2, 0, 1): [-0.5], (3, 0, 0): [-0.125],
        (0, 1, 0): [-0.25], (1, 1, 0): [-1.0, -1.5, -1.75, -1.8],
        (2, 1, 1): [-0.125], (3, 1, 0): [-0.0625],
    }  # fmt: skip
    for level in range(4):
        beams = 1 if level == 0 else 4
        scores = torch.full((2, beams, 4), -50.0)
        for (at, tree, beam), children in good.items():
            if at == level:
                scores[tree, beam, : len(children)] = torch.tensor(children)
        tokens = (torch.arange(scores.numel()) + 100 * level).int().view(-1, 4)
        levels.append(Top(scores.view(-1, 4), tokens))
    return levels


def rows_of(drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """(row_start_M, parents_T) of the rows that verify drafts, as the planner makes them."""
    parents = [row_parents(one) for one in drafts.each()]
    flat = [parent for of_tree in parents for parent in of_tree]
    return offsets([len(of_tree) for of_tree in parents]), ints(flat)


def test_the_golden_trees_are_chosen_and_laid_out(trees: Trees) -> None:
    pool = grown(trees, golden_levels())
    drafts = trees.select(pool, [7, 7])
    row_start_M, parents_T = rows_of(drafts)
    assert parents_T.tolist() == GOLDEN_PARENTS[0] + GOLDEN_PARENTS[1]
    layout = trees.lay_out(row_start_M, parents_T, ints([5, 10]))
    assert layout.positions_T.tolist() == GOLDEN["positions"]
    assert layout.first_child_T.tolist() == GOLDEN["first_child"]
    assert layout.next_sibling_T.tolist() == GOLDEN["next_sibling"]
    bits = [[row for row in range(8) if word >> row & 1] for [word] in layout.mask_TW.tolist()]
    assert bits == [path for parents in GOLDEN_PARENTS for path in paths_of(parents)]


def test_the_golden_trees_are_walked(trees: Trees) -> None:
    parents_T = ints(GOLDEN_PARENTS[0] + GOLDEN_PARENTS[1])
    tokens_T = ints([9, 1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7])
    drawn_T = ints([2, 0, 4, 0, 6, 0, 8, 0, 1, 3, 0, 6, 0, 0, 0, 9])
    accepted = trees.accept(offsets([8, 8]), parents_T, tokens_T, drawn_T)
    assert accepted.each(offsets([8, 8])) == [
        ((0, 2, 4, 6), (2, 4, 6, 8)),
        ((0, 1, 3, 6), (1, 3, 6, 0)),
    ]
    assert accepted.next_N.tolist() == [8, 0]
    assert accepted.from_slots_T is None


@pytest.mark.parametrize(("trees_n", "k", "depth"), [(1, 1, 1), (3, 1, 6), (2, 4, 4), (5, 7, 3)])
def test_levels_grow_as_the_twins_do(native: NativeTrees, trees_n: int, k: int, depth: int) -> None:
    levels = tops(k, trees_n, k, depth)
    mine, twin = grown(native, levels), grown(TWIN, levels)
    assert_same(mine, twin)
    for budget in (0, 1, k, mine.count, mine.count + 5):
        budgets = [max(0, budget - n) for n in range(trees_n)]
        drafts = native.select(mine, budgets)
        assert_same(drafts, TWIN.select(twin, budgets))
        for one, wanted in zip(drafts.each(), budgets, strict=True):
            assert len(one.tokens) == min(wanted, mine.count)
            assert malformed(one, Drafting(depth, k, wanted)) is None


def test_a_beam_may_be_narrower_or_wider_than_its_children(native: NativeTrees) -> None:
    generator = torch.Generator().manual_seed(0)
    first = Top(torch.randn(2, 6, generator=generator), torch.arange(12).int().view(2, 6))
    for width in (1, 4, 6):
        pools = [Pool.empty(2, 6 + 5 * width) for _ in range(2)]
        beams = [
            one.expand(pool, first, width=width)
            for one, pool in zip((native, TWIN), pools, strict=True)
        ]
        assert_same(*beams)
        below = Top(
            torch.randn(2 * width, 5, generator=generator),
            torch.arange(10 * width).int().view(2 * width, 5),
        )
        wide = 5 * width
        last = [
            one.expand(pool, below, beam, wide)
            for one, pool, beam in zip((native, TWIN), pools, beams, strict=True)
        ]
        assert_same(*last)
        assert_same(*pools)
        assert sorted(last[0].places_NW[1].tolist()) == list(range(6, 6 + wide))


def test_a_node_of_a_beam_names_the_row_it_continues(trees: Trees) -> None:
    pool = Pool.empty(2, 2 + 4)
    first = Top(torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]), ints([1, 2, 3, 4]).view(2, 2))
    beam = trees.expand(pool, first)
    assert beam.places_NW.tolist() == [[0, 1], [0, 1]]
    assert beam.rows_NW.tolist() == [[0, 0], [1, 1]]
    second = Top(
        torch.tensor([[-9.0, -9.5], [-1.0, -1.5], [-1.0, -8.0], [-0.5, -8.0]]),
        torch.arange(10, 18).int().view(4, 2),
    )
    beam = trees.expand(pool, second, beam)
    assert beam.rows_NW.tolist() == [[1, 1], [2, 3]]
    assert beam.tokens_NW.tolist() == [[12, 13], [14, 16]]
    assert beam.places_NW.tolist() == [[4, 5], [2, 4]]
    assert pool.parents_NC.tolist() == [[-1, -1, 0, 0, 1, 1]] * 2


def test_equal_scores_go_to_the_first(trees: Trees) -> None:
    pool = pool_of([[(-1.0, place, -1) for place in range(5)]])
    assert trees.select(pool, [2]).tokens_D.tolist() == [0, 1]
    pool = Pool.empty(1, 4)
    beam = trees.expand(pool, Top(torch.tensor([[0.0, -0.0, -1.0, 0.0]]), ints([[5, 6, 7, 8]])))
    assert beam.places_NW.tolist() == [[0, 1, 3, 2]]


def test_nan_is_chosen_after_every_number(trees: Trees) -> None:
    pool = pool_of([[(NAN, 0, -1), (-math.inf, 1, -1), (-9.0, 2, -1), (-1.0, 3, 0), (-9.5, 4, 2)]])
    chosen = [trees.select(pool, [n]).tokens_D.tolist() for n in range(6)]
    # A child of NaN counts for no more than it.
    assert chosen == [[], [2], [2, 4], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]]


def test_scores_without_a_number_give_a_tree_all_the_same(trees: Trees) -> None:
    levels = [
        Top(torch.full((rows, 3), NAN), torch.arange(3).int().repeat(rows, 1)) for rows in (2, 6, 6)
    ]
    drafts = trees.select(grown(trees, levels), [5, 21])
    for one, size in zip(drafts.each(), (5, 21), strict=True):
        assert malformed(one, Drafting(3, 3, size)) is None
        assert len(one.tokens) == size
    assert drafts.each()[0].parents == (-1, -1, -1, 0, 0)


def test_a_child_better_than_its_parent_brings_it_along(trees: Trees) -> None:
    pool = pool_of([[(-5.0, 0, -1), (-1.0, 1, -1), (5.0, 2, 0), (-2.0, 3, 1)]])
    assert trees.select(pool, [2]).tokens_D.tolist() == [1, 3]
    drafts = trees.select(pool, [3])
    assert drafts.tokens_D.tolist() == [0, 1, 3]
    assert drafts.parents_D.tolist() == [-1, -1, 1]
    assert trees.select(pool, [4]).parents_D.tolist() == [-1, -1, 0, 1]


@pytest.mark.slow
@hypothesis.given(pool=random_pools(), budgets=st.lists(st.integers(0, 45), min_size=3, max_size=3))
@MANY
def test_any_pool_gives_a_tree_whose_nodes_are_the_twins(
    native: NativeTrees, pool: Pool, budgets: list[int]
) -> None:
    budgets = budgets[: pool.trees]
    drafts = native.select(pool, budgets)
    assert_same(drafts, TWIN.select(pool, budgets))
    for one, budget in zip(drafts.each(), budgets, strict=True):
        assert malformed(one, Drafting(pool.count, pool.count, budget)) is None
        assert len(one.tokens) == min(budget, pool.count)


@pytest.mark.slow
@hypothesis.given(rows=random_rows())
@MANY
def test_any_rows_are_laid_out_and_walked_as_by_the_twin(native: NativeTrees, rows: Rows) -> None:
    starts_N = ints([7 * n for n in range(len(rows.each))])
    layout = native.lay_out(rows.row_start_M, rows.parents_T, starts_N)
    assert_same(layout, TWIN.lay_out(rows.row_start_M, rows.parents_T, starts_N))
    paths = native.paths(rows.row_start_M, rows.parents_T)
    assert_same(paths, TWIN.paths(rows.row_start_M, rows.parents_T))
    slots = torch.arange(500, 500 + len(rows.parents_T)).int()
    given = rows.row_start_M, rows.parents_T, rows.tokens_T, rows.drawn_T, slots
    accepted = native.accept(*given)
    assert_same(accepted, TWIN.accept(*given))
    told = accepted.each(rows.row_start_M)
    for (parents, tokens, drawn), (path, kept) in zip(rows.each, told, strict=True):
        assert is_path(parents, path)
        assert tuple(tokens[row] for row in path[1:]) == kept[:-1]
        assert kept == tuple(drawn[row] for row in path)
        assert all(token >= 0 for token in kept[1:])


def test_lists_of_children_go_through_all_of_them_in_order(trees: Trees) -> None:
    random = Random(3)
    parents = [-1, *(random.randrange(row) for row in range(1, 50))]
    layout = trees.lay_out(offsets([50]), ints(parents), ints([0]))
    child, sibling = layout.first_child_T.tolist(), layout.next_sibling_T.tolist()
    for row in range(50):
        seen, at = [], child[row]
        while at >= 0:
            seen.append(at)
            at = sibling[at]
        assert seen == [other for other in range(50) if parents[other] == row]


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 200])
def test_masks_have_a_bit_for_every_row(native: NativeTrees, rows: int) -> None:
    """Of a chain, whose last row sees all, and of a star, whose rows see the root."""
    chain, star = list(range(-1, rows - 1)), [-1] + [0] * (rows - 1)
    given = offsets([rows, rows]), ints(chain + star), ints([3, 0])
    layout = native.lay_out(*given)
    assert_same(layout, TWIN.lay_out(*given))
    assert layout.mask_TW.shape == (2 * rows, -(-rows // 64))
    last = sum(
        (word & (1 << 64) - 1) << 64 * at
        for at, word in enumerate(layout.mask_TW[rows - 1].tolist())
    )
    assert last == (1 << rows) - 1
    assert layout.positions_T.tolist() == list(range(3, rows + 3)) + [0] + [1] * (rows - 1)


def test_a_root_alone_is_a_tree(trees: Trees) -> None:
    drafts = trees.select(Pool.empty(2, 5), [4, 4])
    assert drafts.each() == [((), ()), ((), ())]
    row_start_M, parents_T = rows_of(drafts)
    layout = trees.lay_out(row_start_M, parents_T, ints([0, 9]))
    assert layout.positions_T.tolist() == [0, 9]
    assert layout.mask_TW.tolist() == [[1], [1]]
    accepted = trees.accept(row_start_M, parents_T, ints([4, 5]), ints([6, -1]), ints([0, 1]))
    assert accepted.each(row_start_M) == [((0,), (6,)), ((0,), (-1,))]
    assert accepted.next_N.tolist() == [6, -1]
    assert accepted.from_slots_T.tolist() == [-1, -1]


def test_no_trees_are_no_rows(trees: Trees) -> None:
    none = ints([])
    assert trees.select(Pool.empty(0, 3), []).starts == (0,)
    assert trees.lay_out(ints([0]), none, none).mask_TW.shape == (0, 1)
    assert trees.paths(ints([0]), none).path_start_T1.tolist() == [0]
    assert trees.accept(ints([0]), none, none, none, none).lengths_N.tolist() == []


def test_a_full_batch_is_the_twins(native: NativeTrees) -> None:
    """Thirty-two trees of sixty-four rows, every one of them kept to the end by some."""
    levels = tops(1, 32, 8, 7)
    pool = grown(native, levels)
    assert_same(pool, grown(TWIN, levels))
    drafts = native.select(pool, [63] * 32)
    assert_same(drafts, TWIN.select(pool, [63] * 32))
    row_start_M, parents_T = rows_of(drafts)
    assert row_start_M.tolist() == list(range(0, 33 * 64, 64))
    given = row_start_M, parents_T, ints(range(32))
    assert_same(native.lay_out(*given), TWIN.lay_out(*given))
    assert_same(native.paths(*given[:2]), TWIN.paths(*given[:2]))
    tokens_T = ints([token for one in drafts.each() for token in (0, *one.tokens)])
    drawn_T = tokens_T.roll(-1)
    walked = row_start_M, parents_T, tokens_T, drawn_T, torch.arange(32 * 64).int()
    assert_same(native.accept(*walked), TWIN.accept(*walked))


@pytest.mark.parametrize("k", [1, 3, 40, 150])
def test_the_likeliest_are_the_twins(native: NativeTrees, k: int) -> None:
    logits = torch.randn(9, 150, generator=torch.Generator().manual_seed(k)) * 3
    logits[1] = logits[1].round()  # equals: the lower id first
    logits[2, 5:] = -math.inf
    logits[3] = -math.inf
    logits[4, 7] = NAN
    logits[5, 7] = math.inf
    logits[6] = 0.0
    got, wanted = native.top(logits, k), TWIN.top(logits, k)
    assert torch.equal(got.tokens_RK, wanted.tokens_RK)
    torch.testing.assert_close(got.logprobs_RK, wanted.logprobs_RK, equal_nan=True)
    assert got.logprobs_RK[3:6].isnan().all()
    assert got.tokens_RK[3:6].tolist() == [list(range(k))] * 3
    strided = torch.randn(4, 300)[:, :150]
    assert torch.equal(native.top(strided, k).tokens_RK, TWIN.top(strided, k).tokens_RK)


def test_rows_that_are_a_chain_have_no_paths(trees: Trees) -> None:
    tree = trees.paths(offsets([3, 1, 4]), ints([-1, 0, 1, -1, -1, 0, 0, 2]))
    assert tree.path_start_T1.tolist() == [0, 0, 0, 0, 0, 1, 3, 5, 8]
    assert tree.paths.tolist() == [0, 0, 1, 0, 2, 0, 2, 3]
    wanted = tree_of([[]] * 4 + paths_of([-1, 0, 0, 2]))
    assert torch.equal(tree.paths, wanted.paths)


def test_a_row_at_which_nothing_was_drawn_is_not_entered(trees: Trees) -> None:
    parents, tokens = ints([-1, 0, 0, 1, 2]), ints([9, 1, 1, 2, 2])
    entered = trees.accept(offsets([5]), parents, tokens, ints([1, 2, 2, -1, 0]))
    assert entered.each(offsets([5])) == [((0, 1), (1, 2))]
    # Of equal drafts the first whose own draw went well.
    other = trees.accept(offsets([5]), parents, tokens, ints([1, -1, 2, 0, 5]))
    assert other.each(offsets([5])) == [((0, 2, 4), (1, 2, 5))]


def test_misfits_are_refused(native: NativeTrees) -> None:
    pool = pool_of([[(-1.0, 0, -1), (-2.0, 1, 0)]], spare=0)
    late = pool_of([[(-1.0, 0, 1), (-2.0, 1, -1)]])
    top = Top(torch.zeros(1, 2), ints([[0, 1]]))
    two = offsets([2])
    layers = kv_layers(4)
    refusals = {
        "2 more for 2 of 2": lambda: native.expand(pool, top),
        "a beam of 3": lambda: native.expand(Pool.empty(1, 9), top, width=3),
        r"for 1 nodes each of 2": lambda: native.expand(Pool.empty(2, 9), top),
        "budgets": lambda: native.select(pool, [1, 1]),
        r"budgets \(-1,\)": lambda: native.select(pool, [-1]),
        "not before its child": lambda: native.select(late, [1]),
        "parent is not before": lambda: native.lay_out(two, ints([-1, 1]), ints([0])),
        "is not before its": lambda: native.paths(two, ints([-2, 0])),
        "more or fewer rows": lambda: native.lay_out(two, ints([-1]), ints([0])),
        "begin at 0": lambda: native.paths(ints([1, 2]), ints([-1, 0])),
        "ends before it begins": lambda: native.paths(ints([0, 3, 2]), ints([-1, 0])),
        "outside": lambda: native.top(torch.zeros(1, 4), 5),
        "float32": lambda: native.top(torch.zeros(1, 4).double(), 1),
        "wants contiguous int32": lambda: native.accept(two, ints([-1, 0]), two, torch.zeros(2)),
        "slot 24 is outside": lambda: native.compact(layers, two, ints([0, 24]), ints([1, 2])),
        "slot -1 is outside": lambda: native.compact(layers, two, ints([0, -1]), ints([1, 2])),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()
    for call in (lambda: TWIN.select(late, [1]), lambda: TWIN.paths(two, ints([-2, 0]))):
        with pytest.raises(ValueError, match="not before its child"):
            call()


def test_trees_are_opened_by_the_name_of_their_kernels(native: NativeTrees) -> None:
    assert isinstance(open_trees("native", native.team), NativeTrees)
    assert isinstance(open_trees("reference"), ReferenceTrees)
