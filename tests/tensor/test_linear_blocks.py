"""Linears of quantised weights, as GGUF blocks: equal to their twin, and a row's bits its own."""

import pytest
import torch

from aserve.tensor.collective import sum_blocks
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import BLOCK_FORMATS, BlockKind
from aserve.tensor.reference import ReferenceLinear, ReferenceOps
from tests.tensor.blocks import KINDS, blocks_of, dequantised, random_blocks

# n, k, row_blocks: real shapes, one output, edges of 16 outputs, odd numbers of blocks.
SHAPES = (
    (960, 576, 1),
    (1, 32, 1),
    (17, 96, 1),
    (50, 192, 3),
    (31, 352, 11),
    (100, 1536, 12),
)
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 50, 64, 70)


def twin_of(
    ops: NativeOps, blocks: torch.Tensor, kind: BlockKind, k: int, *rest: object
) -> ReferenceLinear:
    """Tiles of AMX hold the weights in bfloat16; every other level has them as they are."""
    if ops.level == "amx":
        return ReferenceOps().pack(dequantised(blocks, kind).bfloat16(), *rest)  # type: ignore[arg-type]
    return ReferenceOps().pack_blocks(blocks, kind, k, *rest)  # type: ignore[arg-type]


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k", "row_blocks"), SHAPES)
def test_blocks_are_their_twin(
    ops: NativeOps, n: int, k: int, row_blocks: int, kind: BlockKind
) -> None:
    torch.manual_seed(n * k)
    blocks, bias, twin = random_blocks(kind, n, k), torch.randn(n), ReferenceOps()
    for bias_or_none in (None, bias):
        packed = ops.pack_blocks(blocks, kind, k, bias_or_none, row_blocks)
        expected = twin_of(ops, blocks, kind, k, bias_or_none, row_blocks)
        for rows in (1, 5, 16, 37, 70):
            x = torch.randn(rows, k)
            parts = ops.linear_parts(x, packed)
            assert relative_error(parts, twin.linear_parts(x, expected)) < 1e-5
            out, total = ops.linear(x, packed), sum_blocks(parts)
            assert relative_error(out, twin.linear(x, expected)) < 1e-5
            assert torch.equal(out, total if bias_or_none is None else total + bias)


@pytest.mark.parametrize("ops", ["amx"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_have_the_bits_of_the_same_weights_in_bfloat16(
    ops: NativeOps, kind: BlockKind
) -> None:
    torch.manual_seed(0)
    for n, k, row_blocks in ((100, 1536, 12), (48, 96, 1), (17, 32, 1)):
        blocks, bias = random_blocks(kind, n, k), torch.randn(n)
        kept = ops.pack_blocks(blocks, kind, k, bias, row_blocks)
        widened = ops.pack(dequantised(blocks, kind).bfloat16(), bias, row_blocks)
        for rows in ROWS:
            x = torch.randn(rows, k)
            assert torch.equal(ops.linear(x, kept), ops.linear(x, widened))


@pytest.mark.parametrize("kind", KINDS)
def test_row_bits_do_not_depend_on_other_rows_or_threads(ops: NativeOps, kind: BlockKind) -> None:
    torch.manual_seed(0)
    one = NativeOps(1)
    for n, k, row_blocks in ((112, 96, 1), (40, 128, 2), (600, 64, 1)):
        packed = ops.pack_blocks(random_blocks(kind, n, k), kind, k, torch.randn(n), row_blocks)
        x = torch.randn(300, k)
        together = ops.linear(x, packed)
        assert torch.equal(one.linear(x, packed), together)
        alone = torch.cat([ops.linear(x[i : i + 1], packed) for i in range(len(x))])
        assert torch.equal(alone, together)
        for rows in ROWS:
            assert torch.equal(ops.linear(x[:rows], packed), together[:rows])
            assert torch.equal(one.linear(x[-rows:], packed), together[-rows:])


@pytest.mark.parametrize("kind", KINDS)
def test_row_blocks_split_over_ranks_have_the_bits_of_one(ops: NativeOps, kind: BlockKind) -> None:
    torch.manual_seed(0)
    blocks, x = random_blocks(kind, 50, 192), torch.randn(35, 192)
    whole = ops.linear_parts(x, ops.pack_blocks(blocks, kind, 192, row_blocks=6))
    for ranks in (2, 3, 6):
        columns = zip(x.chunk(ranks, 1), blocks.chunk(ranks, 1), strict=True)
        split = [
            ops.linear_parts(
                part.contiguous(),
                ops.pack_blocks(block, kind, 192 // ranks, row_blocks=6 // ranks),
            )
            for part, block in columns
        ]
        assert torch.equal(torch.cat(split), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_are_summed_exactly(ops: NativeOps, kind: BlockKind) -> None:
    torch.manual_seed(0)
    low, high = (-128, 128) if kind == "Q8_0" else (0, 16)
    q = torch.randint(low, high, (33, 96))
    minimum = -3.0 if kind == "Q4_1" else 0.0
    weight = (q - (8 if kind == "Q4_0" else 0)) * 0.5 + minimum
    packed = ops.pack_blocks(blocks_of(kind, q, 0.5, minimum), kind, 96)
    for rows in (1, 3, 20, 40):
        x = torch.randint(-8, 9, (rows, 96)).float()
        assert torch.equal(ops.linear(x, packed), x @ weight.T)


@pytest.mark.parametrize("kind", KINDS)
def test_each_column_and_row_finds_its_value(ops: NativeOps, kind: BlockKind) -> None:
    torch.manual_seed(0)
    blocks = random_blocks(kind, 20, 64)
    packed, weight = ops.pack_blocks(blocks, kind, 64), dequantised(blocks, kind)
    # One column alone gives its weight, but that a minimum is added after d * q is rounded.
    expected = weight.bfloat16().float() if ops.level == "amx" else weight
    assert relative_error(ops.linear(torch.eye(64), packed), expected.T) < 1e-6
    assert torch.equal(ops.embed(packed, torch.arange(20)), expected)
    assert torch.equal(ops.embed(packed, torch.tensor([19, 0])), expected[[19, 0]])
    twin = ReferenceOps()
    reference = twin.pack_blocks(blocks, kind, 64)
    assert torch.equal(twin.embed(reference, torch.arange(20)), weight)


def test_scales_may_be_any_float16(ops: NativeOps) -> None:
    q = torch.ones(1, 32, dtype=torch.int64)
    for d in (2.0**-24, 3 * 2.0**-24, 2.0**-14, -65504.0, 0.0, float("inf")):
        packed = ops.pack_blocks(blocks_of("Q8_0", q, d), "Q8_0", 32)
        held = float(torch.tensor(d).bfloat16()) if ops.level == "amx" else d
        assert float(ops.linear(torch.ones(1, 32), packed)) == 32 * held
        assert float(ops.embed(packed, torch.tensor([0]))[0, 31]) == held


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_row(ops: NativeOps, kind: BlockKind) -> None:
    x = torch.ones(3, 32)
    x[1, 4] = float("nan")
    x[2, 4] = float("inf")
    q = torch.full((20, 32), 9)
    out = ops.linear(x, ops.pack_blocks(blocks_of(kind, q, 1.0, 1.0), kind, 32))
    assert out[0].eq({"Q8_0": 288, "Q4_0": 32, "Q4_1": 320}[kind]).all()
    assert out[1].isnan().all()
    assert out[2].isinf().all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows_round_to_bfloat16_and_no_rows_give_no_rows(ops: NativeOps, kind: BlockKind) -> None:
    # 1 + 2^-8 lies between two bfloat16 values: the tie goes to 1, in products and in sums.
    packed = ops.pack_blocks(blocks_of(kind, torch.full((3, 64), 9), 1.0, 2.0), kind, 64)
    even, tie = torch.ones(1, 64), torch.full((1, 64), 1 + 2**-8)
    assert torch.equal(ops.linear(tie, packed), ops.linear(even, packed))
    assert ops.linear(torch.empty(0, 64), packed).shape == (0, 3)
    assert ops.linear_parts(torch.empty(0, 64), packed).shape == (1, 0, 3)


def test_misfit_blocks_are_refused(ops: NativeOps) -> None:
    blocks = random_blocks("Q4_1", 4, 96)
    for any_ops in (ops, ReferenceOps()):
        with pytest.raises(ValueError, match="multiple of 32"):
            any_ops.pack_blocks(blocks, "Q4_1", 96, row_blocks=2)
        with pytest.raises(ValueError, match="equal"):
            any_ops.pack_blocks(blocks, "Q4_1", 96, row_blocks=5)
        with pytest.raises(ValueError, match="60"):
            any_ops.pack_blocks(blocks, "Q4_1", 128)
        with pytest.raises(ValueError, match="54"):
            any_ops.pack_blocks(blocks, "Q4_0", 96)
        with pytest.raises(ValueError, match="uint8"):
            any_ops.pack_blocks(blocks.int(), "Q4_1", 96)
        with pytest.raises(ValueError, match="bias"):
            any_ops.pack_blocks(blocks, "Q4_1", 96, torch.randn(3))
    with pytest.raises(ValueError, match="Q4_K"):
        ops.pack_blocks(blocks, "Q4_K", 96)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "bytes_each"), [("Q8_0", 34), ("Q4_0", 18), ("Q4_1", 20)])
def test_blocks_are_not_expanded(ops: NativeOps, kind: BlockKind, bytes_each: int) -> None:
    packed = ops.pack_blocks(random_blocks(kind, 64, 128), kind, 128, torch.randn(64), 2)
    assert (packed.n, packed.k, packed.row_blocks) == (64, 128, 2)
    assert (packed.format, packed.dtype) == (BLOCK_FORMATS[kind], torch.bfloat16)
    assert packed.nbytes == 64 * 4 * bytes_each + 64 * 4
