"""The packed linear: equal to its twin, and a row's bits its own."""

import pytest
import torch

from aserve.tensor.collective import sum_blocks
from aserve.tensor.native import NativeOps
from aserve.tensor.reference import ReferenceOps

DTYPES = (torch.float32, torch.bfloat16)
# n, k, row_blocks: real shapes, single elements, edges of 16 outputs and 32 inputs, odd blocks.
SHAPES = (
    (960, 576, 1),
    (1, 1, 1),
    (17, 33, 1),
    (50, 48, 3),
    (64, 42, 2),
    (31, 31, 31),
    (16, 1536, 2),
)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "row_blocks"), SHAPES)
def test_linear_is_its_twin(
    ops: NativeOps, n: int, k: int, row_blocks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(n * k)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    twin = ReferenceOps()
    for bias_or_none in (None, bias):
        packed = ops.pack(weight, bias_or_none, row_blocks)
        expected = twin.pack(weight, bias_or_none, row_blocks)
        for rows in (1, 5, 16, 37):
            x = torch.randn(rows, k)
            out = ops.linear(x, packed)
            assert relative_error(out, twin.linear(x, expected)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_other_rows(ops: NativeOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for n, k, row_blocks in ((112, 96, 1), (40, 70, 2)):
        packed = ops.pack(torch.randn(n, k).to(dtype), torch.randn(n), row_blocks)
        x = torch.randn(300, k)
        together = ops.linear(x, packed)
        alone = torch.cat([ops.linear(x[i : i + 1], packed) for i in range(len(x))])
        assert torch.equal(alone, together)
        for rows in (2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 100, 299):
            assert torch.equal(ops.linear(x[:rows], packed), together[:rows])
            assert torch.equal(ops.linear(x[-rows:], packed), together[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(ops: NativeOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    packed = ops.pack(torch.randn(500, 64).to(dtype))
    x = torch.randn(70, 64)
    expected = ops.linear(x, packed)
    for threads in (1, 3):
        assert torch.equal(NativeOps(threads).linear(x, packed), expected)


def test_row_blocks_are_partial_sums_added_left_to_right(ops: NativeOps) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 96).bfloat16(), torch.randn(5, 96)
    whole = ops.linear(x, ops.pack(weight, row_blocks=3))
    parts = [
        ops.linear(x[:, i : i + 32].contiguous(), ops.pack(weight[:, i : i + 32]))
        for i in (0, 32, 64)
    ]
    assert torch.equal(whole, parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "row_blocks"), SHAPES)
def test_linear_is_the_sum_of_its_parts_and_the_bias(
    ops: NativeOps, n: int, k: int, row_blocks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(n * k)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    twin = ReferenceOps()
    expected = twin.pack(weight, bias, row_blocks)
    for bias_or_none in (None, bias):
        packed = ops.pack(weight, bias_or_none, row_blocks)
        for rows in (1, 5, 16, 37):
            x = torch.randn(rows, k)
            parts = ops.linear_parts(x, packed)
            assert parts.shape == (row_blocks, rows, n)
            assert relative_error(parts, twin.linear_parts(x, expected)) < 1e-5
            total = sum_blocks(parts)
            assert torch.equal(
                ops.linear(x, packed), total if bias_or_none is None else total + bias
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_split_over_ranks_have_the_bits_of_one(ops: NativeOps, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(50, 120).to(dtype), torch.randn(50), torch.randn(35, 120)
    whole = ops.linear_parts(x, ops.pack(weight, bias, 6))
    for ranks in (2, 3, 6):
        width = 120 // ranks
        split = [
            ops.linear_parts(
                x[:, at : at + width].contiguous(),
                ops.pack(weight[:, at : at + width], row_blocks=6 // ranks),
            )
            for at in range(0, 120, width)
        ]
        assert torch.equal(torch.cat(split), whole)


def test_no_rows_give_no_rows(ops: NativeOps) -> None:
    packed = ops.pack(torch.randn(3, 8), row_blocks=2)
    assert ops.linear(torch.empty(0, 8), packed).shape == (0, 3)
    assert ops.linear_parts(torch.empty(0, 8), packed).shape == (2, 0, 3)


def test_weight_may_be_a_strided_view(ops: NativeOps) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(20, 12), torch.randn(2, 20)
    out = ops.linear(x, ops.pack(weight.T))
    assert relative_error(out, x @ weight) < 1e-5


def test_nan_and_infinity_stay_in_their_row(ops: NativeOps) -> None:
    x = torch.ones(3, 32)
    x[1, 4] = float("nan")
    x[2, 4] = float("inf")
    out = ops.linear(x, ops.pack(torch.ones(20, 32).bfloat16()))
    assert out[0].eq(32).all()
    assert out[1].isnan().all()
    assert out[2].isinf().all()


def test_bf16_rows_round_to_nearest_even(ops: NativeOps) -> None:
    # 1 + 2^-8 lies between two bfloat16 values, 1 + 3 * 2^-8 too: ties go to the even one.
    x = torch.tensor([[1 + 2**-8], [1 + 3 * 2**-8]])
    out = ops.linear(x, ops.pack(torch.ones(1, 1).bfloat16()))
    assert out.flatten().tolist() == [1.0, 1 + 2**-6]


def test_misfits_are_refused(ops: NativeOps) -> None:
    packed = ops.pack(torch.randn(4, 6))
    with pytest.raises(ValueError, match="5 columns"):
        ops.linear(torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="5 columns"):
        ops.linear_parts(torch.randn(2, 5), packed)
    with pytest.raises(ValueError, match="contiguous"):
        ops.linear(torch.randn(6, 2).T, packed)
    with pytest.raises(ValueError, match="float64"):
        ops.linear(torch.randn(2, 6).double(), packed)
    with pytest.raises(ValueError, match="float16"):
        ops.pack(torch.randn(4, 6).half())
    with pytest.raises(ValueError, match="equal row blocks"):
        ops.pack(torch.randn(4, 6), row_blocks=4)
    with pytest.raises(ValueError, match="bias"):
        ops.pack(torch.randn(4, 6), torch.randn(3))
    with pytest.raises(ValueError, match="at least one"):
        ops.pack(torch.empty(0, 6))


def test_packed_weight_describes_itself(ops: NativeOps) -> None:
    packed = ops.pack(torch.randn(32, 64).bfloat16(), torch.randn(32), 2)
    assert (packed.n, packed.k, packed.row_blocks) == (32, 64, 2)
    assert packed.dtype == torch.bfloat16
    assert packed.format == "bf16"
    assert packed.nbytes == 32 * 64 * 2 + 32 * 4
