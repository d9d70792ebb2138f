"""Norm, rotation, gated activation, embedding and sums against their twins."""

import pytest
import torch

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import open_ops
from aserve.tensor.reference import ReferenceOps
from aserve.tensor.rope import RopeTable, rope_table

TWIN = ReferenceOps()
WIDTHS = (1, 15, 16, 17, 576, 1000)
INF, NAN = float("inf"), float("nan")


def same(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dim", WIDTHS)
def test_norms_are_their_twins(ops: NativeOps, dim: int) -> None:
    torch.manual_seed(dim)
    weight = torch.randn(dim)
    for rows in (0, 1, 7, 90):
        x, residual = torch.randn(rows, dim) * 3, torch.randn(rows, dim)
        same(ops.rms_norm(x, weight, 1e-5), TWIN.rms_norm(x, weight, 1e-5))
        total, normed = ops.add_rms_norm(residual, x, weight, 1e-5)
        assert torch.equal(total, residual + x)
        same(normed, TWIN.rms_norm(residual + x, weight, 1e-5))
        assert torch.equal(ops.add(x, residual), x + residual)


def test_norm_of_heads_takes_a_strided_view(ops: NativeOps) -> None:
    torch.manual_seed(0)
    wide, weight = torch.randn(9, 6, 24), torch.randn(24)
    part = wide[:, 2:5]
    same(ops.rms_norm(part, weight, 1e-6), TWIN.rms_norm(part, weight, 1e-6))


def test_row_bits_do_not_depend_on_other_rows(ops: NativeOps) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(200, 300), torch.randn(300)
    norms, gated = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)
    for i in (0, 1, 99, 199):
        assert torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-5)[0], norms[i])
        assert torch.equal(ops.silu_mul(x[i : i + 1])[0], gated[i])


@pytest.mark.parametrize("dim", WIDTHS)
def test_silu_mul_is_its_twin(ops: NativeOps, dim: int) -> None:
    torch.manual_seed(dim)
    for rows in (0, 1, 40):
        x = torch.randn(rows, 2 * dim) * 10
        same(ops.silu_mul(x), TWIN.silu_mul(x))


def test_silu_mul_at_the_ends_of_the_scale(ops: NativeOps) -> None:
    gate = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4, 1e-30, NAN, 3e38, INF])
    x = torch.cat((gate, torch.ones(10)))[None]
    out, expected = ops.silu_mul(x)[0], TWIN.silu_mul(x)[0]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(("dim", "rot"), [(64, 64), (40, 40), (64, 16), (18, 6), (2, 2)])
def test_rope_is_its_twin(ops: NativeOps, dim: int, rot: int) -> None:
    torch.manual_seed(dim)
    table = rope_table({"rope_theta": 1e4, "partial_rotary_factor": rot / dim}, dim, 50)
    assert table.rot == rot
    for rows in (0, 1, 33):
        both = torch.randn(rows, 5, dim)
        expected = both.clone()
        positions = torch.randint(0, 50, (rows,), dtype=torch.int32)
        # q and k are views of one row, as a joint projection gives them.
        ops.rope(both[:, :3], both[:, 3:], positions, table)
        TWIN.rope(expected[:, :3], expected[:, 3:], positions, table)
        same(both, expected)
        assert torch.equal(both[..., rot:], expected[..., rot:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed_reads_a_table_or_a_packed_weight(ops: NativeOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(37, 50).to(dtype)
    for ids in (torch.tensor([36, 0, 5, 5]), torch.tensor([], dtype=torch.int64)):
        expected = table[ids].float()
        assert torch.equal(ops.embed(table, ids), expected)
        assert torch.equal(ops.embed(table, ids.int()), expected)
        for row_blocks in (1, 2):
            packed = ops.pack(table, row_blocks=row_blocks)
            assert torch.equal(ops.embed(packed, ids), expected)
        assert torch.equal(TWIN.embed(TWIN.pack(table), ids), expected)


def test_misfits_are_refused(ops: NativeOps) -> None:
    x, weight = torch.randn(4, 8), torch.randn(8)
    table = RopeTable(torch.randn(10, 8))
    positions = torch.zeros(4, dtype=torch.int32)
    heads = torch.randn(4, 2, 8)
    refusals = {
        "norm weight": lambda: ops.rms_norm(x, torch.randn(7), 1e-5),
        "bfloat16": lambda: ops.rms_norm(x, weight.bfloat16(), 1e-5),
        "same float32 shape": lambda: ops.add(x, x[:2]),
        "not contiguous": lambda: ops.add(x.T, x.T),
        "odd number": lambda: ops.silu_mul(torch.randn(2, 3)),
        "contiguous float32": lambda: ops.silu_mul(x.T),
        "position 10 is outside": lambda: ops.rope(heads, heads, positions + 10, table),
        "position -1 is outside": lambda: ops.rope(heads, heads, positions - 1, table),
        "wants contiguous int32": lambda: ops.rope(heads, heads, positions.long(), table),
        "but k": lambda: ops.rope(heads, heads[:2], positions, table),
        "even number up to": lambda: ops.rope(
            heads, heads, positions, RopeTable(torch.randn(10, 10))
        ),
        "outside the table": lambda: ops.embed(x, torch.tensor([4])),
        "contiguous .vocab": lambda: ops.embed(x.T, torch.tensor([0])),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(ValueError, match="outside the table"):
        ops.embed(ops.pack(x), torch.tensor([-1]))


def test_twin_takes_float64() -> None:
    torch.manual_seed(0)
    twin = open_ops("reference", 1)
    x, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64)
    torch.testing.assert_close(twin.linear(x, twin.pack(weight, row_blocks=2)), x @ weight.T)
    assert twin.rms_norm(x, torch.ones(8), 1e-6).dtype == torch.float64
