"""KV kernels, as a GPU runs them but for their order in time, against the twin."""

import pytest
import torch

from aserve.tensor.cuda import CudaOps
from aserve.tensor.ops import KvCopy, KvLayer
from aserve.tensor.reference import ReferenceOps

TWIN = ReferenceOps()
HEADS, DIM = 3, 24


def pool(dtype: torch.dtype, *, seed: int = 0, pages: int = 5, page_size: int = 4) -> KvLayer:
    """Pages with gaps between them, as pools of many layers have."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(2, pages, 2, page_size, HEADS, DIM, generator=generator).to(dtype)
    return KvLayer(wide[0, :, 0], wide[1, :, 1])


def slots(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def copied(kv: KvLayer) -> KvLayer:
    return KvLayer(kv.k_PSHD.clone(), kv.v_PSHD.clone())


def same(one: KvLayer, other: KvLayer) -> bool:
    return torch.equal(one.k_PSHD, other.k_PSHD) and torch.equal(one.v_PSHD, other.v_PSHD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("at", [slots(), slots(7), slots(19, 0, 5, 6, 12)])
def test_append_gather_and_move_are_the_twins(
    cuda_ops: CudaOps, dtype: torch.dtype, at: torch.Tensor
) -> None:
    kv = pool(dtype)
    wanted = copied(kv)
    k, v = torch.randn(2, len(at), HEADS, DIM, generator=torch.Generator().manual_seed(3))
    cuda_ops.kv_append(k, v, kv, at)
    TWIN.kv_append(k, v, wanted, at)
    assert same(kv, wanted)
    for mine, twin in zip(cuda_ops.kv_gather(kv, at), TWIN.kv_gather(wanted, at), strict=True):
        assert torch.equal(mine, twin)
    # Overlapping on purpose: all is read before anything is written.
    to = torch.roll(at, 1)
    cuda_ops.kv_move(kv, at, to)
    TWIN.kv_move(wanted, at, to)
    assert same(kv, wanted)


def test_slots_outside_the_pages_are_left_out(cuda_ops: CudaOps) -> None:
    kv = pool(torch.bfloat16)
    before = copied(kv)
    k, v = torch.ones(2, 2, HEADS, DIM)
    cuda_ops.kv_append(k, v, kv, slots(-1, 20))
    assert same(kv, before)
    cuda_ops.kv_append(k, v, kv, slots(-1, 19))
    assert kv.k_PSHD[4, 3].eq(1).all()
    assert torch.equal(kv.k_PSHD[:4], before.k_PSHD[:4])


def test_a_head_of_int8_is_its_values_over_their_scale(cuda_ops: CudaOps) -> None:
    kv = KvLayer(*torch.full((2, 2, 4, HEADS, DIM + 4), 99, dtype=torch.int8))
    k, v = torch.randn(2, 3, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    k[1, 1] = 0
    v[2, 0, 5] = float("inf")
    cuda_ops.kv_append(k, v, kv, slots(0, 6, 3))
    for x_THD, rows in zip((k, v), cuda_ops.kv_gather(kv, slots(0, 6, 3)), strict=True):
        scale = rows[..., DIM:].clone().view(torch.float32)
        wanted = x_THD.abs().amax(-1, keepdim=True) / 127
        finite = x_THD.isfinite().all(-1, keepdim=True)
        assert torch.equal(scale[finite], wanted[finite])
        assert scale[~finite].isnan().all()
        back = torch.where(finite & (scale > 0), x_THD / scale, 0).round()
        assert torch.equal(rows[..., :DIM].float(), back)
    untouched = kv.k_PSHD.view(8, HEADS, DIM + 4)[[1, 2, 4, 5, 7]]
    assert untouched.eq(99).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("begin", "end"), [(0, 0), (0, 11), (3, 10), (5, 6)])
def test_copies_between_layouts_are_the_twins(
    cuda_ops: CudaOps, dtype: torch.dtype, begin: int, end: int
) -> None:
    source = pool(dtype, seed=1, pages=6, page_size=4)
    to = pool(dtype, seed=2, pages=4, page_size=3)
    wanted = copied(to)
    copy = KvCopy(slots(5, 0, 3), slots(2, 0, 3, 1), end, begin, head_from=1, head_to=0, heads=2)
    cuda_ops.kv_copy(source, to, copy)
    TWIN.kv_copy(source, wanted, copy)
    assert same(to, wanted)


@pytest.mark.parametrize("kind", ["interleave", "zigzag"])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize("lengths", [(), (0,), (7,), (1, 12, 0, 5)])
def test_context_parallel_rows_are_the_twins(
    cuda_ops: CudaOps, kind: str, cp: int, lengths: tuple[int, ...]
) -> None:
    assert torch.equal(cuda_ops.cp_counts(kind, cp, lengths), TWIN.cp_counts(kind, cp, lengths))
    x = torch.arange(sum(lengths) * 5, dtype=torch.int16).view(-1, 5)
    splits = []
    for rank in range(cp):
        assert torch.equal(
            cuda_ops.cp_index(kind, cp, rank, lengths), TWIN.cp_index(kind, cp, rank, lengths)
        )
        splits.append(cuda_ops.cp_split(x, kind, cp, rank, lengths))
        assert torch.equal(splits[-1], TWIN.cp_split(x, kind, cp, rank, lengths))
    assert torch.equal(cuda_ops.cp_join(torch.cat(splits), kind, cp, lengths), x)
