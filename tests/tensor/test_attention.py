"""Paged attention: equal to its twin, and a row's bits the business of its sequence alone."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.reference import ReferenceOps
from tests.tensor.pools import Pool, random_keys

DTYPES = (torch.float32, torch.bfloat16)


def tolerance(ops: NativeOps, dtype: torch.dtype) -> float:
    # With AMX the weights of the softmax are rounded to bfloat16 too.
    return 6e-3 if dtype == torch.bfloat16 and ops.level == "amx" else 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(9, 3, 64), (4, 4, 16), (8, 1, 80), (3, 3, 20), (14, 2, 64), (2, 1, 256), (5, 1, 7)],
)
@pytest.mark.parametrize("page_size", [1, 7, 16, 24, 64])
def test_attention_is_its_twin(
    ops: NativeOps, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> None:
    lengths = (1, 5, 64, 65, 130)
    sequences = [random_keys(i, n, heads, kv_heads, dim) for i, n in enumerate(lengths)]
    pool = Pool(ops, sequences, page_size, dtype)
    rows = []
    for n, (length, own) in enumerate(zip(lengths, (1, 5, 3, 65, 70), strict=True)):
        pool.write(n, 0, length)
        rows.append((n, length - own, length))
    out = pool.attend(rows)
    pool.ops = ReferenceOps()
    expected = pool.attend(rows)
    assert (out - expected).abs().max() < tolerance(ops, dtype) * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 1, 48), (8, 1, 16)])
def test_row_bits_depend_on_their_sequence_alone(
    ops: NativeOps, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    length = 150
    keys = random_keys(0, length, heads, kv_heads, dim)
    other = random_keys(1, 90, heads, kv_heads, dim)

    def whole(page_size: int, seed: int, threads: int) -> torch.Tensor:
        pool = Pool(NativeOps(threads), [keys], page_size, dtype, seed)
        pool.write(0, 0, length)
        return pool.attend([(0, 0, length)])

    expected = whole(16, 0, 2)
    for page_size, seed, threads in ((1, 1, 1), (7, 2, 2), (64, 3, 3), (16, 4, 1)):
        assert torch.equal(whole(page_size, seed, threads), expected)

    pool = Pool(ops, [keys, other], 16, dtype)
    pool.write(1, 0, 90)
    cuts = [0, 1, 2, 16, 63, 64, 65, 128, 129, 150]
    for begin, end in itertools.pairwise(cuts):
        # Later positions are still poison here, and were there in the whole run.
        pool.write(0, begin, end)
        alone = pool.attend([(0, begin, end)])
        assert torch.equal(alone, expected[begin:end])
        mixed = pool.attend([(1, 80, 90), (0, begin, end), (1, 0, 90)])
        assert torch.equal(mixed[10 : 10 + end - begin], expected[begin:end])
    one_by_one = pool.attend([(0, i, i + 1) for i in range(length)])
    assert torch.equal(one_by_one, expected)


def interleaved(length: int, cp: int, rank: int) -> range:
    return range(rank, length, cp)


def zigzag(length: int, cp: int, rank: int) -> list[int]:
    blocks = torch.arange(length).tensor_split(2 * cp)
    return [*blocks[rank].tolist(), *blocks[2 * cp - 1 - rank].tolist()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [interleaved, zigzag])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (8, 1, 20)])
def test_rows_of_a_context_parallel_rank_have_the_bits_of_the_whole(
    ops: NativeOps,
    share: Callable[[int, int, int], Sequence[int]],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    lengths = (300, 2, 131)
    sequences = [random_keys(i, n, heads, kv_heads, dim) for i, n in enumerate(lengths)]
    pool = Pool(ops, sequences, 16, dtype)
    for n, length in enumerate(lengths):
        pool.write(n, 0, length)
    whole = [pool.attend([(n, 0, length)]) for n, length in enumerate(lengths)]
    for cp in (2, 3, 8):
        for rank in range(cp):
            # The second sequence leaves ranks without rows; the third has a prefix of 50.
            places = [share(300, cp, rank), share(2, cp, rank)]
            places.append([50 + at for at in share(81, cp, rank)])
            rows = [(n, at, lengths[n]) for n, at in enumerate(places)]
            expected = torch.cat([whole[n][list(at)] for n, at, _ in rows])
            assert torch.equal(pool.attend_at(rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scattered_rows_are_their_twins(ops: NativeOps, dtype: torch.dtype) -> None:
    keys = random_keys(0, 200, 4, 2, 32)
    pool = Pool(ops, [keys], 16, dtype)
    pool.write(0, 0, 150)  # the rest is poison that no row may see, though kv_len counts it
    rows = [(0, [0, 3, 63, 64, 100, 149], 200)]
    out = pool.attend_at(rows)
    pool.ops = ReferenceOps()
    expected = pool.attend_at(rows)
    assert (out - expected).abs().max() < tolerance(ops, dtype) * expected.abs().max()


def test_equal_values_come_back_unchanged(ops: NativeOps) -> None:
    keys = random_keys(0, 100, 4, 2, 32)
    keys.v_LGD.fill_(1.5)
    pool = Pool(ops, [keys], 16, torch.float32)
    pool.write(0, 0, 100)
    torch.testing.assert_close(pool.attend([(0, 0, 100)]), torch.full((100, 4, 32), 1.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_scores_choose_one_key(ops: NativeOps, dtype: torch.dtype) -> None:
    keys = random_keys(0, 200, 2, 1, 16)
    keys.k_LGD.mul_(1e4)
    pool = Pool(ops, [keys], 16, dtype)
    pool.write(0, 0, 200)
    out = pool.attend([(0, 0, 200)])
    pool.ops = ReferenceOps()
    torch.testing.assert_close(out, pool.attend([(0, 0, 200)]), rtol=1e-2, atol=2e-2)


def test_rows_see_keys_up_to_their_own(ops: NativeOps) -> None:
    keys = random_keys(0, 70, 2, 2, 16)
    pool = Pool(ops, [keys], 16, torch.bfloat16)
    pool.write(0, 0, 70)
    first = pool.attend([(0, 0, 70)])[0]
    torch.testing.assert_close(first, keys.v_LGD[0].bfloat16().float())


def test_sequences_without_rows_and_steps_without_sequences(ops: NativeOps) -> None:
    keys = random_keys(0, 20, 2, 1, 16)
    pool = Pool(ops, [keys], 16, torch.float32)
    pool.write(0, 0, 20)
    assert torch.equal(pool.attend([(0, 20, 20), (0, 3, 5)]), pool.attend([(0, 3, 5)]))
    assert pool.attend([(0, 0, 0)]).shape == (0, 2, 16)
    none = torch.zeros(0, dtype=torch.int32)
    empty = Attend(none, none, none.view(0, 1), torch.zeros(1, dtype=torch.int32), none)
    assert ops.attention(torch.empty(0, 2, 16), pool.kv, empty, 0.25).shape == (0, 2, 16)


def test_queries_may_be_part_of_a_wider_row(ops: NativeOps) -> None:
    keys = random_keys(0, 30, 4, 2, 16)
    pool = Pool(ops, [keys], 16, torch.float32)
    pool.write(0, 0, 30)
    wide = torch.full((30, 6, 16), float("nan"))
    wide[:, 1:5] = keys.q_LHD
    step = pool.step([(0, 0, 30)])
    out = ops.attention(wide[:, 1:5], pool.kv, step, 0.25)
    assert torch.equal(out, ops.attention(keys.q_LHD, pool.kv, step, 0.25))


def test_pages_may_be_part_of_a_larger_pool(ops: NativeOps) -> None:
    keys = random_keys(0, 40, 2, 1, 32)
    pool = Pool(ops, [keys], 16, torch.bfloat16)
    pool.write(0, 0, 40)
    both = torch.full((pool.kv.k_PSHD.shape[0], 2, 16, 1, 32), float("nan")).bfloat16()
    both[:, 0], both[:, 1] = pool.kv.k_PSHD, pool.kv.v_PSHD
    shared = KvLayer(both[:, 0], both[:, 1])
    step = pool.step([(0, 7, 40)])
    out = ops.attention(keys.q_LHD[7:], shared, step, 0.25)
    assert torch.equal(out, ops.attention(keys.q_LHD[7:], pool.kv, step, 0.25))


def test_misfits_are_refused(ops: NativeOps) -> None:
    keys = random_keys(0, 20, 4, 2, 16)
    pool = Pool(ops, [keys], 16, torch.float32)
    pool.write(0, 0, 20)
    step = pool.step([(0, 10, 20)])
    q = keys.q_LHD[10:]

    def refused(match: str, q: torch.Tensor = q, scale: float = 1.0, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            ops.attention(q, pool.kv, dataclasses.replace(step, **changes), scale)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    refused("page 99 is outside", page_table_NP=ints(0, 99).view(1, 2))
    refused("page -1 is outside", page_table_NP=ints(-1, 0).view(1, 2))
    refused("more than the page table", kv_len_N=ints(33))
    refused("not below kv_len", kv_len_N=ints(19))
    refused("do not ascend", positions_T=ints(-1, *range(11, 20)))
    refused("do not ascend", positions_T=ints(10, 10, *range(12, 20)))
    refused("do not ascend", positions_T=ints(*range(19, 9, -1)))
    refused("positions is", positions_T=ints(*range(10, 19)))
    refused("does not begin", row_start_M=ints(1, 10))
    refused("does not end", row_start_M=ints(0, 9))
    three = {"kv_len_N": ints(20, 20, 20), "page_table_NP": step.page_table_NP.repeat(3, 1)}
    refused("decreases", row_start_M=ints(0, 1 << 30, 5, 10), **three)
    refused("int32", row_start_M=torch.tensor([0, 10]))
    refused("int32", page_table_NP=torch.zeros(1, 2))
    refused("multiple of kv_heads", q=q[:, :3].contiguous())
    refused("pages of", q=q[..., :8].contiguous())
    refused("contiguous heads", q=q.transpose(1, 2).contiguous().transpose(1, 2))
    refused("float64", q=q.double())
    refused("scale", scale=-1.0)
