"""Attention over long contexts, drafted trees, windows, sinks and int8 pages: equal to its twin,
and a row's bits the business of its own keys alone."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, Tree, paths_of, tree_of
from aserve.tensor.reference import ReferenceOps
from tests.tensor.pools import Keys, Pool, random_keys

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
TWIN = ReferenceOps()


def tolerance(ops: NativeOps, dtype: torch.dtype) -> float:
    # With AMX the weights of the softmax are rounded to bfloat16 too.
    return 6e-3 if dtype != torch.float32 and ops.level == "amx" else 1e-5


def written(ops: NativeOps, keys: Keys, dtype: torch.dtype, page_size: int = 16) -> Pool:
    pool = Pool(ops, [keys], page_size, dtype)
    pool.write(0, 0, len(keys))
    return pool


def near(got: Tensor, expected: Tensor, ops: NativeOps, dtype: torch.dtype) -> bool:
    return bool((got - expected).abs().max() < tolerance(ops, dtype) * expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 48), (2, 2, 20)])
def test_long_contexts_have_one_result_however_they_are_shared_out(
    ops: NativeOps, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    length = 900
    keys = random_keys(1, length, heads, kv_heads, dim)
    pool = written(ops, keys, dtype)
    whole = pool.attend([(0, 600, length)])
    twin = written(NativeOps(1), keys, dtype)
    twin.ops = TWIN
    assert near(whole, twin.attend([(0, 600, length)]), ops, dtype)
    for threads in (1, 2, 3, 16):
        pool.ops = NativeOps(threads)
        for begin, end in ((600, 601), (767, 769), (895, 900), (899, 900), (600, 900)):
            assert torch.equal(pool.attend([(0, begin, end)]), whole[begin - 600 : end - 600])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [7, 16])
def test_int8_and_other_pages_at_every_head_size_are_their_twins(
    ops: NativeOps, page_size: int, dtype: torch.dtype
) -> None:
    for heads, kv_heads, dim in ((9, 3, 64), (8, 1, 80), (20, 1, 128), (5, 1, 7)):
        keys = random_keys(2, 70, heads, kv_heads, dim)
        pool = written(ops, keys, dtype, page_size)
        got = pool.attend([(0, 30, 70)])
        pool.ops = TWIN
        assert near(got, pool.attend([(0, 30, 70)]), ops, dtype)


# Roots and branches, chains within them, more than one root.
TREES = ((-1, 0, 0, 1, 1, 2, 5, 3), (-1, -1, 0, 1, 2, 3, 4, 0, 0, 0), (-1, 0, 1, 2))


class TreePool:
    """A pool with a prefix and the KV of a tree's rows after it, and each row's chain beside it."""

    def __init__(self, ops: NativeOps, start: int, parents: tuple[int, ...], sizes: tuple) -> None:
        heads, kv_heads, dim, dtype = sizes
        self.paths = paths_of(parents)
        self.start, self.n_rows = start, len(parents)
        own = random_keys(start, start + len(parents), heads, kv_heads, dim)
        sequences = [own]
        for path in self.paths:
            places = [*range(start), *(start + row for row in path)]
            sequences.append(Keys(own.q_LHD[places], own.k_LGD[places], own.v_LGD[places]))
        other = random_keys(99, 40, heads, kv_heads, dim)
        self.pool = Pool(ops, [*sequences, other], 16, dtype)
        for n, keys in enumerate(self.pool.sequences):
            self.pool.write(n, 0, len(keys))

    def tree_step(self) -> tuple[Tensor, Attend]:
        """The tree between rows of another sequence."""
        pool, start, n_rows, n = self.pool, self.start, self.n_rows, len(self.paths) + 1
        step = pool.step([(n, 30, 40), (0, start, start + n_rows), (n, 3, 4)])
        positions = step.positions_T.clone()
        depths = [len(path) - 1 for path in self.paths]
        positions[10 : 10 + n_rows] = torch.tensor([start + depth for depth in depths])
        tree = tree_of([*[[]] * 10, *self.paths, []])
        other = pool.sequences[n].q_LHD
        q = torch.cat([other[30:40], pool.sequences[0].q_LHD[start:], other[3:4]])
        return q, dataclasses.replace(step, positions_T=positions, tree=tree)

    def chains(self, **sight: object) -> Tensor:
        rows = []
        for n, path in enumerate(self.paths):
            length = self.start + len(path)
            step = self.pool.step([(n + 1, length - 1, length)])
            q = self.pool.sequences[n + 1].q_LHD[length - 1 :]
            rows.append(self.pool.ops.attention(q, self.pool.kv, step, 0.2, **sight))
        return torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parents", TREES)
@pytest.mark.parametrize("sizes", [(6, 2, 64), (20, 1, 32), (4, 2, 20)])
def test_a_row_of_a_tree_has_the_bits_of_a_plain_chain(
    ops: NativeOps, parents: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    for start in (0, 3, 45, 254, 256, 530):
        made = TreePool(ops, start, parents, (*sizes, dtype))
        q, step = made.tree_step()
        for sight in ({}, {"window": 40}, {"window": 300, "sinks_H": torch.ones(sizes[0])}):
            chains = made.chains(**sight)
            for threads in (1, 2, 8):
                out = NativeOps(threads).attention(q, made.pool.kv, step, 0.2, **sight)
                assert torch.equal(out[10 : 10 + made.n_rows], chains)
            expected = TWIN.attention(q, made.pool.kv, step, 0.2, **sight)
            assert near(out, expected, ops, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 256, 300, 5000])
def test_rows_see_no_key_before_their_window(
    ops: NativeOps, window: int, dtype: torch.dtype
) -> None:
    length = 700
    keys = random_keys(3, length, 6, 2, 32)
    pool = written(ops, keys, dtype)
    rows = [(0, 0, length)]
    step, q = pool.step(rows), keys.q_LHD
    whole = ops.attention(q, pool.kv, step, 0.2, window=window)
    assert near(whole, TWIN.attention(q, pool.kv, step, 0.2, window=window), ops, dtype)
    for threads, begin, end in ((1, 0, 90), (2, 255, 258), (3, 640, 700), (8, 699, 700)):
        part = pool.step([(0, begin, end)])
        got = NativeOps(threads).attention(q[begin:end], pool.kv, part, 0.2, window=window)
        assert torch.equal(got, whole[begin:end])
    before = pool.table_NP[0, : max(0, length - window) // 16].long()
    pool.kv.k_PSHD[before] = 1  # as bytes of a scale a small number, too
    pool.kv.v_PSHD[before] = 1
    last = ops.attention(q[-1:], pool.kv, pool.step([(0, length - 1, length)]), 0.2, window=window)
    assert torch.equal(last, whole[-1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_take_their_share_of_the_weight(ops: NativeOps, dtype: torch.dtype) -> None:
    keys = random_keys(4, 600, 6, 2, 32)
    pool = written(ops, keys, dtype)
    sinks = torch.tensor([-torch.inf, -3.0, 0.0, 1.0, 4.0, 200.0])
    for rows in ([(0, 0, 600)], [(0, 599, 600)], [(0, 10, 12)]):
        step, q = pool.step(rows), keys.q_LHD[rows[0][1] : rows[0][2]]
        got = ops.attention(q, pool.kv, step, 0.2, sinks_H=sinks)
        assert near(got, TWIN.attention(q, pool.kv, step, 0.2, sinks_H=sinks), ops, dtype)
        plain = ops.attention(q, pool.kv, step, 0.2)
        assert torch.equal(got[:, 0], plain[:, 0])
        assert got[:, 5].abs().max() == 0
        assert torch.equal(NativeOps(5).attention(q, pool.kv, step, 0.2, sinks_H=sinks), got)


def test_random_trees_are_their_chains(ops: NativeOps) -> None:
    dice = random.Random(7)
    for _ in range(6):
        n_rows = dice.randint(1, 24)
        parents = tuple(dice.randint(-1, row - 1) for row in range(n_rows))
        made = TreePool(ops, dice.randint(0, 600), parents, (6, 2, 64, torch.bfloat16))
        q, step = made.tree_step()
        out = ops.attention(q, made.pool.kv, step, 0.2)
        assert torch.equal(out[10 : 10 + n_rows], made.chains())


def test_what_is_no_tree_is_refused(ops: NativeOps) -> None:
    made = TreePool(ops, 20, TREES[0], (4, 2, 16, torch.bfloat16))
    q, step = made.tree_step()
    assert step.tree is not None

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def refused(match: str, **changes: object) -> None:
        assert step.tree is not None
        tree = dataclasses.replace(step.tree, **changes)
        with pytest.raises(ValueError, match=match):
            ops.attention(q, made.pool.kv, dataclasses.replace(step, tree=tree), 0.2)

    starts, paths = step.tree.path_start_T1, step.tree.paths
    refused("paths is", paths=paths.long())
    refused("path_start is", path_start_T1=starts[1:].contiguous())
    refused("does not begin", path_start_T1=starts + 1)
    refused("does not end", paths=paths[:-1].contiguous())
    refused("path 8 is outside", paths=paths.clamp(min=8))
    refused("path -1 is outside", paths=paths - 1)
    backwards = starts.clone()
    backwards[5] = 9
    refused("decreases", path_start_T1=backwards)
    longer = starts.clone()
    longer[11] += 1
    refused("do not begin together", path_start_T1=longer)
    lost = starts.clone()
    lost[11] = 0
    refused("with and without|do not begin together", path_start_T1=lost)
    alone = Tree(ints(0, 1), ints(0))
    with pytest.raises(ValueError, match="window is negative"):
        ops.attention(q, made.pool.kv, step, 0.2, window=-1)
    with pytest.raises(ValueError, match="path_start is"):
        ops.attention(q, made.pool.kv, dataclasses.replace(step, tree=alone), 0.2)
