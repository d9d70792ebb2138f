"""Writing, reading and moving rows of paged KV."""

import pytest
import torch

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import KvLayer
from aserve.tensor.reference import ReferenceOps

TWIN = ReferenceOps()


def pool(dtype: torch.dtype, page_size: int = 4) -> KvLayer:
    shape = (6, page_size, 2, 14 if dtype == torch.int8 else 10)
    return KvLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_append_gather_and_move_are_their_twins(
    ops: NativeOps, page_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(page_size)
    native, twin = pool(dtype, page_size), pool(dtype, page_size)
    for rows in (0, 1, 5):
        wide = torch.randn(rows, 5, 10)
        k, v = wide[:, :2], wide[:, 3:]
        slots = torch.randperm(6 * page_size)[:rows].int()
        ops.kv_append(k, v, native, slots)
        TWIN.kv_append(k, v, twin, slots)
        assert torch.equal(native.k_PSHD, twin.k_PSHD)
        assert torch.equal(native.v_PSHD, twin.v_PSHD)
        for a, b in zip(ops.kv_gather(native, slots), TWIN.kv_gather(twin, slots), strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b)
    # A rotation: each slot is a source and a destination.
    start, end = ints(0, 1, 2, 5), ints(1, 2, 5, 0)
    ops.kv_move(native, start, end)
    TWIN.kv_move(twin, start, end)
    assert torch.equal(native.k_PSHD, twin.k_PSHD)
    assert torch.equal(native.v_PSHD, twin.v_PSHD)


def test_append_rounds_to_nearest_even_and_keeps_nan(ops: NativeOps) -> None:
    kv = pool(torch.bfloat16)
    x = torch.randn(1, 2, 10)
    x[0, 0, :5] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("nan"), float("inf"), -3.4e38])
    ops.kv_append(x, x, kv, ints(3))
    expected = x.bfloat16()
    torch.testing.assert_close(kv.k_PSHD[0, 3][None], expected, rtol=0, atol=0, equal_nan=True)


def test_int8_rows_are_the_nearest_multiples_of_their_scale(ops: NativeOps) -> None:
    kv = KvLayer(*(torch.zeros(4, 16, 3, 68, dtype=torch.int8) for _ in "kv"))
    torch.manual_seed(0)
    k, v = torch.randn(50, 3, 64) * 9, torch.randn(50, 3, 64) * 1e-3
    k[0, 0] = 0
    k[1, 1] = torch.arange(64) * 2.0 + 1  # of a scale of 1, half of them ties
    k[1, 1, 63] = 127.0
    k[1, 1, :3] = torch.tensor([0.5, 1.5, -2.5])
    slots = torch.arange(50, dtype=torch.int32)
    ops.kv_append(k, v, kv, slots)
    assert kv.head_dim == 64
    for x, stored in zip((k, v), ops.kv_gather(kv, slots), strict=True):
        scale = stored[..., 64:].contiguous().view(torch.float32)
        assert torch.equal(scale, x.abs().amax(-1, keepdim=True) / 127)
        assert ((stored[..., :64] * scale - x).abs() <= scale * 0.5001).all()
    assert kv.k_PSHD[0, 1, 1, :3].tolist() == [0, 2, -2]
    assert kv.k_PSHD[0, 0, 0].eq(0).all()


def test_int8_rows_that_are_not_finite_stay_so(ops: NativeOps) -> None:
    kv, twin = pool(torch.int8), pool(torch.int8)
    x = torch.randn(2, 2, 10)
    x[0, 0, 3], x[1, 1, 9] = float("nan"), float("-inf")
    for one, layer in ((ops, kv), (TWIN, twin)):
        one.kv_append(x, x, layer, ints(1, 2))
        scale = layer.k_PSHD[0, 1:3, :, 10:].contiguous().view(torch.float32)
        assert scale.isnan()[..., 0].tolist() == [[True, False], [False, True]]
    assert torch.equal(kv.k_PSHD[..., :10], twin.k_PSHD[..., :10])


def test_other_slots_are_left_alone(ops: NativeOps) -> None:
    kv = pool(torch.float32)
    x = torch.ones(1, 2, 10)
    ops.kv_append(x, x, kv, ints(9))
    assert kv.k_PSHD.sum() == 20
    assert kv.k_PSHD[2, 1].eq(1).all()


def test_misfits_are_refused(ops: NativeOps) -> None:
    kv = pool(torch.bfloat16)
    x = torch.randn(2, 2, 10)
    refusals = {
        "slot 24 is outside": lambda: ops.kv_append(x, x, kv, ints(0, 24)),
        "slot -1 is outside": lambda: ops.kv_gather(kv, ints(-1)),
        "slot 99 is outside": lambda: ops.kv_move(kv, ints(0), ints(99)),
        "do not fit pages": lambda: ops.kv_append(x[:, :1].contiguous(), x, kv, ints(0, 1)),
        "wants contiguous int32": lambda: ops.kv_gather(kv, torch.tensor([1])),
        r"wants contiguous int32 \(2,\)": lambda: ops.kv_append(x, x, kv, ints(0)),
        "not contiguous inside": lambda: ops.kv_gather(
            KvLayer(kv.k_PSHD.transpose(1, 2), kv.v_PSHD), ints(0)
        ),
        "they overlap": lambda: ops.kv_gather(
            KvLayer(kv.k_PSHD[:1].expand(kv.k_PSHD.shape), kv.v_PSHD), ints(20)
        ),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()
    before = kv.k_PSHD.clone()
    with pytest.raises(ValueError, match="slot"):
        ops.kv_append(x, x, kv, ints(0, 24))
    assert torch.equal(kv.k_PSHD, before)
