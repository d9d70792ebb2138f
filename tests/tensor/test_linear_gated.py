"""The gated pair of linears: bit for bit what its three steps give, in every mix of formats."""

import pytest
import torch

from aserve import _native
from aserve.tensor.native import NativeLinear, NativeOps
from tests.tensor.blocks import random_blocks
from tests.tensor.conftest import _poisoned

FORMATS = ("f32", "bf16", "Q8_0", "Q4_0", "Q4_1")
MIXES = (*((f, f) for f in FORMATS), ("Q4_1", "Q8_0"), ("bf16", "Q4_0"), ("Q4_1", "f32"))
ROWS = (1, 2, 5, 16, 17, 33, 70, 130)


def packed(ops: NativeOps, kind: str, n: int, k: int, row_blocks: int, bias: bool) -> NativeLinear:
    bias_N = torch.randn(n) if bias else None
    if kind in ("f32", "bf16"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        return ops.pack((torch.randn(n, k) / k**0.5).to(dtype), bias_N, row_blocks)
    return ops.pack_blocks(random_blocks(kind, n, k), kind, k, bias_N, row_blocks)  # type: ignore[arg-type]


def gated(
    ops: NativeOps, gate_up: NativeLinear, down: NativeLinear, x: torch.Tensor, parts: bool
) -> torch.Tensor:
    m, k = x.shape
    out = _poisoned((down.row_blocks if parts else 1, m, down.n))
    _native.gated(ops.team, gate_up.packed, down.packed, x.data_ptr(), m, k, out.data_ptr(), parts)
    return out if parts else out[0]


def steps(
    ops: NativeOps, gate_up: NativeLinear, down: NativeLinear, x: torch.Tensor, parts: bool
) -> torch.Tensor:
    hidden = ops.silu_mul(ops.linear(x, gate_up))
    return ops.linear_parts(hidden, down) if parts else ops.linear(hidden, down)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_is_its_three_steps(ops: NativeOps, mix: tuple[str, str], bias: bool) -> None:
    torch.manual_seed(0)
    # n of down odd; gate and up whole panels; row blocks on either side.
    for hidden, dim, up_blocks, down_blocks in ((64, 192, 1, 3), (96, 32, 3, 1), (160, 128, 1, 2)):
        gate_up = packed(ops, mix[0], 2 * dim, hidden, up_blocks, bias)
        down = packed(ops, mix[1], hidden + 1, dim, down_blocks, bias)
        for rows in ROWS:
            x = torch.randn(rows, hidden)
            for parts in (False, True):
                expected = steps(ops, gate_up, down, x, parts)
                assert torch.equal(gated(ops, gate_up, down, x, parts), expected)


def test_halves_that_are_no_whole_panels_are_composed(ops: NativeOps) -> None:
    torch.manual_seed(0)
    gate_up, down = packed(ops, "bf16", 40, 32, 1, True), packed(ops, "bf16", 32, 20, 2, True)
    for rows in (1, 18):
        x = torch.randn(rows, 32)
        assert torch.equal(gated(ops, gate_up, down, x, False), steps(ops, gate_up, down, x, False))


@pytest.mark.parametrize("kind", ["bf16", "Q4_1"])
def test_gated_rows_do_not_depend_on_others_or_threads(ops: NativeOps, kind: str) -> None:
    torch.manual_seed(0)
    gate_up, down = packed(ops, kind, 384, 64, 1, False), packed(ops, kind, 64, 192, 3, False)
    x, one = torch.randn(300, 64), NativeOps(1)
    whole = gated(ops, gate_up, down, x, False)
    for begin, end in ((0, 1), (7, 9), (100, 116), (120, 160), (299, 300), (0, 300)):
        some = gated(one, gate_up, down, x[begin:end].contiguous(), False)
        assert torch.equal(some, whole[begin:end])


def test_no_rows_leave_the_output_alone_and_misfits_are_refused(ops: NativeOps) -> None:
    gate_up, down = packed(ops, "Q4_0", 64, 32, 1, False), packed(ops, "Q4_0", 32, 32, 1, False)
    assert gated(ops, gate_up, down, torch.empty(0, 32), False).shape == (0, 32)
    with pytest.raises(ValueError, match="wide"):
        gated(ops, down, down, torch.ones(1, 32), False)
    with pytest.raises(ValueError, match="64 columns"):
        gated(ops, gate_up, down, torch.ones(1, 64), False)
