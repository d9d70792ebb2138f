"""The kernels of drafted trees, as a GPU runs them but for their order in time, and the twin."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from aserve.tensor.cuda import CudaOps
from aserve.tensor.tree import Noise, Pool, Top
from aserve.tensor.tree_cuda import CudaTrees
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
    max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def trees(cuda_ops: CudaOps) -> CudaTrees:
    return CudaTrees(cuda_ops)


@pytest.mark.parametrize(("trees_n", "k", "depth"), [(1, 1, 1), (3, 1, 6), (2, 4, 4), (2, 7, 3)])
def test_levels_and_what_is_chosen_of_them_are_the_twins(
    trees: CudaTrees, trees_n: int, k: int, depth: int
) -> None:
    levels = tops(k, trees_n, k, depth)
    mine, twin = grown(trees, levels), grown(TWIN, levels)
    assert_same(mine, twin)
    for budget in (0, 1, k, mine.count, mine.count + 5):
        budgets = [max(0, budget - n) for n in range(trees_n)]
        assert_same(trees.select(mine, budgets), TWIN.select(twin, budgets))


@pytest.mark.parametrize("width", [1, 3, 8])
def test_beams_of_any_width_are_the_twins(trees: CudaTrees, width: int) -> None:
    scores = torch.tensor([[-1.0, NAN, -0.5, -1.0, -math.inf, -0.5, 0.0, -0.0]])
    top = Top(scores, torch.arange(8).int().view(1, 8))
    pools = [Pool.empty(1, 8) for _ in range(2)]
    beams = [
        one.expand(pool, top, width=width) for one, pool in zip((trees, TWIN), pools, strict=True)
    ]
    assert_same(*beams)
    assert_same(*pools)


@pytest.mark.slow
@hypothesis.given(pool=random_pools(), budgets=st.lists(st.integers(0, 45), min_size=3, max_size=3))
@MANY
def test_any_pool_gives_the_twins_tree(trees: CudaTrees, pool: Pool, budgets: list[int]) -> None:
    budgets = budgets[: pool.trees]
    assert_same(trees.select(pool, budgets), TWIN.select(pool, budgets))


@pytest.mark.slow
@hypothesis.given(rows=random_rows())
@MANY
def test_any_rows_are_laid_out_and_walked_as_by_the_twin(trees: CudaTrees, rows: Rows) -> None:
    starts_N = ints([7 * n for n in range(len(rows.each))])
    given = rows.row_start_M, rows.parents_T
    assert_same(trees.lay_out(*given, starts_N), TWIN.lay_out(*given, starts_N))
    assert_same(trees.paths(*given), TWIN.paths(*given))
    walked = *given, rows.tokens_T, rows.drawn_T
    assert_same(trees.accept(*walked), TWIN.accept(*walked))
    slots = torch.arange(500, 500 + len(rows.parents_T)).int()
    assert_same(trees.accept(*walked, slots), TWIN.accept(*walked, slots))


@pytest.mark.parametrize("rows", [1, 64, 65, 200])
def test_masks_have_a_bit_for_every_row(trees: CudaTrees, rows: int) -> None:
    parents = [*range(-1, rows - 1), -1, *[0] * (rows - 1)]
    given = offsets([rows, rows]), ints(parents), ints([3, 0])
    wanted = TWIN.lay_out(*given)
    assert_same(trees.lay_out(*given), wanted)
    assert_same(trees.lay_out(*given, rows_max=rows), wanted)


def test_more_candidates_than_threads_and_words_are_the_twins(trees: CudaTrees) -> None:
    levels = tops(3, 2, 8, 7)
    mine = grown(trees, levels)
    assert_same(mine, grown(TWIN, levels))
    assert_same(trees.select(mine, [63, 200]), TWIN.select(mine, [63, 200]))


@pytest.mark.parametrize("k", [1, 3, 40])
def test_the_likeliest_are_the_twins(trees: CudaTrees, k: int) -> None:
    logits = torch.randn(7, 150, generator=torch.Generator().manual_seed(k)) * 3
    logits[1] = logits[1].round()  # equals: the lower id first
    logits[2, 5:] = -math.inf
    logits[3] = -math.inf
    logits[4, 7] = NAN
    logits[5, 7] = math.inf
    got, wanted = trees.top(logits, k), TWIN.top(logits, k)
    assert torch.equal(got.tokens_RK, wanted.tokens_RK)
    torch.testing.assert_close(got.logprobs_RK, wanted.logprobs_RK, equal_nan=True)


@pytest.mark.parametrize(("m", "k"), [(1, 1), (40, 1), (40, 8), (300, 300)])
def test_rows_under_noise_are_the_twins(trees: CudaTrees, m: int, k: int) -> None:
    generator = torch.Generator().manual_seed(m)
    found = (torch.randn(5, 400, generator=generator) * 3).log_softmax(-1).sort(descending=True)
    top = Top(found.values[:, :m].contiguous(), found.indices[:, :m].int().contiguous())
    top.logprobs_RK[3, m // 2 :] = -math.inf if m > 1 else 0.0
    top.logprobs_RK[4] = NAN
    seeds = torch.tensor([0, 1, -3, 1 << 62, 5])
    noise = Noise(seeds, ints([1, 2, 3, 4, 5]), torch.tensor([0.0, 0.4, 1.0, 2.0, 0.7]))
    got, wanted = trees.under_noise(top, noise, k), TWIN.under_noise(top, noise, k)
    assert torch.equal(got.tokens_RK, wanted.tokens_RK)
    torch.testing.assert_close(got.logprobs_RK, wanted.logprobs_RK, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_kv_of_paths_moves_in_all_layers(
    trees: CudaTrees, dtype: torch.dtype, page_size: int
) -> None:
    """Pairs follow each other: what one reads the next but one writes."""
    layers, wanted = (
        [
            dataclasses.replace(layer, k_PSHD=layer.k_PSHD.to(dtype), v_PSHD=layer.v_PSHD.to(dtype))
            for layer in kv_layers(page_size, 20 // page_size)
        ]
        for _ in range(2)
    )
    starts = offsets([4, 0, 3])
    moves = ints([2, 4, -1, 7, 12, 13, 17]), ints([1, 2, -1, 4, 11, 12, 13])
    trees.compact(layers, starts, *moves)
    TWIN.compact(wanted, starts, *moves)
    for mine, twin in zip(layers, wanted, strict=True):
        assert torch.equal(mine.k_PSHD, twin.k_PSHD)
        assert torch.equal(mine.v_PSHD, twin.v_PSHD)


def test_layers_of_other_shapes_move_too_and_slots_outside_stay(trees: CudaTrees) -> None:
    layers = [*kv_layers(4, 3), *kv_layers(4, 5, 1)]
    before = [layer.k_PSHD.clone() for layer in layers]
    trees.compact(layers, offsets([2]), ints([3, 19]), ints([0, 12]))
    assert all(
        torch.equal(layer.k_PSHD[0, 0], old[0, 3])
        for layer, old in zip(layers, before, strict=True)
    )
    assert torch.equal(layers[0].k_PSHD[1:], before[0][1:])
    assert torch.equal(layers[3].k_PSHD[3, 0], before[3][4, 3])


def test_misfits_are_refused(trees: CudaTrees) -> None:
    pool = pool_of([[(-1.0, 0, -1), (-2.0, 1, 0)]], spare=0)
    top = Top(torch.zeros(1, 2), ints([0, 1]).view(1, 2))
    two = offsets([2])
    noise = Noise(torch.zeros(1, dtype=torch.int64), ints([0]), torch.ones(1))
    refusals = {
        "2 more for 2 of 2": lambda: trees.expand(pool, top),
        "want contiguous": lambda: trees.expand(
            Pool.empty(1, 9), Top(top.logprobs_RK.double(), top.tokens_RK)
        ),
        "budgets": lambda: trees.select(pool, [1, 1]),
        "9000 candidates": lambda: trees.select(
            dataclasses.replace(Pool.empty(1, 9000), count=9000), [1]
        ),
        "129 tokens": lambda: trees.top(torch.zeros(1, 400), 129),
        "5 of 2 tokens": lambda: trees.under_noise(top, noise, 5),
        "begin with 0": lambda: trees.paths(ints([]), ints([])),
        "wants contiguous int32": lambda: trees.accept(two, ints([-1, 0]), two, torch.zeros(2)),
        r"offsets of trees": lambda: trees.lay_out(ints([]), ints([]), ints([])),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()
