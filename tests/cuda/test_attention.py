"""Paged attention, down to the fragments of its matrix products, against the twin in float64."""

import pytest
import torch

from aserve.tensor.cuda import ALL_KEYS, CudaOps, Sight
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.reference import ReferenceOps
from tests.tensor.pools import Keys, Pool, random_keys

# Weights are rounded to bfloat16 before they meet the values.
CLOSE = {"rtol": 2e-2, "atol": 1e-2}
SHAPES = [(4, 4, 64), (6, 2, 64), (3, 1, 40), (8, 1, 128), (9, 3, 96)]


class Case:
    """Sequences in pages, and what a step asks of them."""

    def __init__(self, ops: CudaOps, lengths: list[int], heads: int, kv_heads: int, dim: int):
        self.ops = ops
        self.keys = [random_keys(n, length, heads, kv_heads, dim) for n, length in
                     enumerate(lengths)]  # fmt: skip
        self.pool = Pool(ops, self.keys, 16, torch.bfloat16)
        for n, length in enumerate(lengths):
            self.pool.write(n, 0, length)
        self.scale = dim**-0.5

    def attend(self, rows: list[tuple[int, int, int]], sight: Sight = ALL_KEYS) -> torch.Tensor:
        q = torch.cat([self.keys[n].q_LHD[begin:end] for n, begin, end in rows])
        step = self.pool.step(rows)
        return self.ops.attention_with(q, self.pool.kv, step, self.scale, sight)

    def wanted(self, n: int, row: int, visible: torch.Tensor, sinks: torch.Tensor | None = None):
        """In float64, of one row, over the keys at `visible`."""
        return one_row(self.keys[n], row, visible, self.scale, sinks)


def one_row(
    keys: Keys, row: int, visible: torch.Tensor, scale: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    group = keys.q_LHD.shape[1] // keys.k_LGD.shape[1]
    q = keys.q_LHD[row].bfloat16().double()
    k = keys.k_LGD[visible].bfloat16().double().repeat_interleave(group, dim=1)
    v = keys.v_LGD[visible].bfloat16().double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,lhd->hl", q, k) * scale
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
    weights = scores.softmax(-1)[:, : len(visible)]
    return torch.einsum("hl,lhd->hd", weights, v).float()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode_and_chunks_are_the_twins(
    cuda_ops: CudaOps, heads: int, kv_heads: int, dim: int
) -> None:
    case = Case(cuda_ops, [1, 70, 300, 0, 33], heads, kv_heads, dim)
    twin = ReferenceOps()
    for rows in (
        [(0, 0, 1), (1, 69, 70), (2, 299, 300), (4, 32, 33)],  # decode
        [(1, 10, 70), (0, 0, 1), (2, 240, 270)],  # chunks
        [(1, 0, 0), (2, 255, 257), (4, 5, 5)],  # sequences without rows; over a split's edge
    ):
        got = case.attend(rows)
        q = torch.cat([case.keys[n].q_LHD[begin:end] for n, begin, end in rows])
        wanted = twin.attention(q, case.pool.kv, case.pool.step(rows), case.scale)
        torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("dim", [64, 128])
def test_a_rows_bits_are_its_own_in_every_tile_and_split(cuda_ops: CudaOps, dim: int) -> None:
    case = Case(cuda_ops, [530, 40], 4, 2, dim)
    alone = case.attend([(0, 529, 530)])  # splits shared out
    beside = case.attend([(1, 39, 40), (0, 529, 530)])[1:]
    chunk = case.attend([(0, 490, 530)])[-1:]  # all splits in one block
    assert torch.equal(alone, beside)
    assert torch.equal(alone, chunk)


def test_positions_with_gaps_see_all_keys_up_to_theirs(cuda_ops: CudaOps) -> None:
    case = Case(cuda_ops, [90], 2, 1, 64)
    at = [3, 10, 64, 65, 89]
    step = case.pool.step_at([(0, at, 90)])
    q = case.keys[0].q_LHD[at]
    got = cuda_ops.attention(q, case.pool.kv, step, case.scale)
    wanted = torch.stack([case.wanted(0, row, torch.arange(row + 1)) for row in at])
    torch.testing.assert_close(got, wanted, **CLOSE)


@pytest.mark.parametrize("window", [1, 17, 64, 300, 1000])
def test_a_window_hides_what_is_older_whatever_its_pages_hold(
    cuda_ops: CudaOps, window: int
) -> None:
    case = Case(cuda_ops, [420], 4, 2, 64)
    # Pages that no row sees any more belong to somebody else, who left NaN in them.
    rows = [(0, 350, 420)]
    first = max(0, 350 - window + 1)
    for page in case.pool.table_NP[0, : first // 16].tolist():
        case.pool.kv.k_PSHD[page] = float("nan")
        case.pool.kv.v_PSHD[page] = float("nan")
    got = case.attend(rows, Sight(window=window))
    few = case.attend([(0, 419, 420)], Sight(window=window))
    for row in (350, 385, 419):
        visible = torch.arange(max(0, row - window + 1), row + 1)
        torch.testing.assert_close(got[row - 350], case.wanted(0, row, visible), **CLOSE)
    assert torch.equal(few[0], got[-1])


def test_sinks_take_their_share_of_the_weight(cuda_ops: CudaOps) -> None:
    case = Case(cuda_ops, [300], 4, 2, 64)
    sinks = torch.tensor([0.0, 3.0, -2.0, float("-inf")])
    got = case.attend([(0, 299, 300)], Sight(sinks_H=sinks))
    whole = case.attend([(0, 260, 300)], Sight(sinks_H=sinks))
    wanted = case.wanted(0, 299, torch.arange(300), sinks)
    torch.testing.assert_close(got[0], wanted, **CLOSE)
    assert torch.equal(got[0], whole[-1])


@pytest.mark.parametrize("window", [0, 5])
def test_rows_of_a_tree_see_the_text_and_their_own_path(cuda_ops: CudaOps, window: int) -> None:
    parents, text_len = [-1, 0, 0, 1, 2, 4, 1], 61  # the tree lies over a block's edge
    case = Case(cuda_ops, [text_len + len(parents), 9], 4, 2, 64)
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
    positions = [text_len + len(path) - 1 for path in paths]
    step = case.pool.step_at([(0, positions, text_len + len(parents)), (1, [8], 9)])
    starts = [0]
    for path in [*paths, []]:  # the second sequence has no tree
        starts.append(starts[-1] + len(path))
    sight = Sight(
        window=window,
        path_start_M=torch.tensor(starts, dtype=torch.int32),
        paths=torch.tensor([place for path in paths for place in path], dtype=torch.int32),
    )
    q = torch.cat([case.keys[0].q_LHD[text_len:], case.keys[1].q_LHD[8:]])
    got = cuda_ops.attention_with(q, case.pool.kv, step, case.scale, sight)
    for row, path in enumerate(paths):
        keys = [*range(text_len), *[text_len + place for place in path]]
        visible = torch.tensor(keys[-window:] if window else keys)
        wanted = case.wanted(0, text_len + row, visible)
        torch.testing.assert_close(got[row], wanted, **CLOSE)
    text = torch.arange(9)[-window:] if window else torch.arange(9)
    torch.testing.assert_close(got[-1], case.wanted(1, 8, text), **CLOSE)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (4, 2, 128), (2, 1, 40)])
def test_int8_keys_are_as_good_as_the_bfloat16_they_stand_for(
    cuda_ops: CudaOps, heads: int, kv_heads: int, dim: int
) -> None:
    case = Case(cuda_ops, [310], heads, kv_heads, dim)
    pages = case.pool.kv.k_PSHD.shape[0]
    quantised = KvLayer(*torch.zeros((2, pages, 16, kv_heads, dim + 4), dtype=torch.int8))
    keys = case.keys[0]
    slots = case.pool.slots(0, 0, 310)
    cuda_ops.kv_append(keys.k_LGD, keys.v_LGD, quantised, slots)
    wide = [
        rows[..., :dim].float() * rows[..., dim:].clone().view(torch.float32)
        for rows in cuda_ops.kv_gather(quantised, slots)
    ]
    stands_for = Keys(keys.q_LHD, *wide)
    for begin in (309, 270):
        step: Attend = case.pool.step([(0, begin, 310)])
        got = cuda_ops.attention(keys.q_LHD[begin:310], quantised, step, case.scale)
        wanted = one_row_wide(stands_for, 309, case.scale)
        torch.testing.assert_close(got[-1], wanted, **CLOSE)


def one_row_wide(keys: Keys, row: int, scale: float) -> torch.Tensor:
    """Keys and values as they are, only the query rounded."""
    group = keys.q_LHD.shape[1] // keys.k_LGD.shape[1]
    k = keys.k_LGD[: row + 1].double().repeat_interleave(group, dim=1)
    v = keys.v_LGD[: row + 1].double().repeat_interleave(group, dim=1)
    scores = torch.einsum("hd,lhd->hl", keys.q_LHD[row].bfloat16().double(), k) * scale
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v).float()


def test_shapes_without_a_kernel_are_refused(cuda_ops: CudaOps) -> None:
    for heads, dim, dtype in ((2, 256, torch.bfloat16), (2, 36, torch.bfloat16),
                              (2, 64, torch.float32), (3, 64, torch.bfloat16)):  # fmt: skip
        kv = KvLayer(*torch.zeros((2, 1, 16, 2, dim), dtype=dtype))
        one = torch.zeros(1, dtype=torch.int32)
        attend = Attend(one, one, one[None], torch.tensor([0, 1], dtype=torch.int32), one + 1)
        with pytest.raises(ValueError, match=r"pages of|head_dim"):
            cuda_ops.attention(torch.zeros(1, heads, dim), kv, attend, 1.0)


def test_pages_that_cannot_be_loaded_in_16_bytes_are_refused(cuda_ops: CudaOps) -> None:
    wide = torch.zeros(2, 2 * 16 * 2 * 64 + 8, dtype=torch.bfloat16)
    off = KvLayer(*(x[1:-7].view(2, 16, 2, 64) for x in wide))
    apart = wide[0, : 2 * (16 * 2 * 64 + 4)].view(2, -1)[:, : 16 * 2 * 64].unflatten(1, (16, 2, 64))
    one = torch.zeros(1, dtype=torch.int32)
    attend = Attend(one, one, one[None], torch.tensor([0, 1], dtype=torch.int32), one + 1)
    for kv in (off, KvLayer(apart, apart)):
        with pytest.raises(ValueError, match="16-byte units"):
            cuda_ops.attention(torch.zeros(1, 2, 64), kv, attend, 1.0)
