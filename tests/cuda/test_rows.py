"""Row kernels, as a GPU runs them but for their order in time, against the twin."""

import pytest
import torch

from aserve.tensor.cuda import CudaOps
from aserve.tensor.reference import ReferenceOps
from aserve.tensor.rope import RopeTable

TWIN = ReferenceOps()
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("dim", [1, 31, 64, 513, 1024])
def test_norms_are_the_twins(cuda_ops: CudaOps, rows: int, dim: int) -> None:
    x, residual, weight = normal(1, rows, dim), normal(2, rows, dim), normal(3, dim)
    torch.testing.assert_close(
        cuda_ops.rms_norm(x, weight, 1e-5), TWIN.rms_norm(x, weight, 1e-5), **CLOSE
    )
    total, normed = cuda_ops.add_rms_norm(residual, x, weight, 1e-5)
    wanted_total, wanted = TWIN.add_rms_norm(residual, x, weight, 1e-5)
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted, **CLOSE)


def test_heads_inside_a_wider_row_are_normed_each_by_itself(cuda_ops: CudaOps) -> None:
    both, weight = normal(4, 3, 5 * 48), normal(5, 48)
    heads = both.view(3, 5, 48)[:, 1:4]
    torch.testing.assert_close(
        cuda_ops.rms_norm(heads, weight, 1e-6), TWIN.rms_norm(heads, weight, 1e-6), **CLOSE
    )


def test_a_rows_norm_does_not_depend_on_the_rows_beside_it(cuda_ops: CudaOps) -> None:
    x, weight = normal(6, 9, 768), normal(7, 768)
    together = cuda_ops.rms_norm(x, weight, 1e-5)
    for row in range(9):
        alone = cuda_ops.rms_norm(x[row : row + 1], weight, 1e-5)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rot"), [(6, 2, 64, 64), (3, 3, 40, 20)])
def test_rope_turns_as_the_twin_does(
    cuda_ops: CudaOps, heads: int, kv_heads: int, dim: int, rot: int
) -> None:
    angles = normal(8, 50, rot // 2)
    table = RopeTable(torch.cat([angles.cos(), angles.sin()], dim=1).contiguous())
    positions = torch.tensor([0, 49, 7, 7], dtype=torch.int32)
    q, k = normal(9, 4, heads, dim), normal(10, 4, kv_heads, dim)
    wanted_q, wanted_k = q.clone(), k.clone()
    TWIN.rope(wanted_q, wanted_k, positions, table)
    cuda_ops.rope(q, k, positions, table)
    torch.testing.assert_close(q, wanted_q, **CLOSE)
    torch.testing.assert_close(k, wanted_k, **CLOSE)


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (7, 1026), (3, 4098)])
def test_elementwise_kernels_are_the_twins(cuda_ops: CudaOps, shape: tuple[int, int]) -> None:
    x, y = normal(11, *shape), normal(12, *shape)
    assert torch.equal(cuda_ops.add(x, y), TWIN.add(x, y))
    torch.testing.assert_close(cuda_ops.silu_mul(x), TWIN.silu_mul(x), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding_gives_rows_and_nan_for_ids_outside(
    cuda_ops: CudaOps, dtype: torch.dtype
) -> None:
    table, ids = normal(13, 11, 33).to(dtype), torch.tensor([10, 0, 3, 3])
    assert torch.equal(cuda_ops.embed(table, ids), TWIN.embed(table, ids))
    assert cuda_ops.embed(table, torch.tensor([11, -1])).isnan().all()


@pytest.mark.parametrize(("n", "k", "row_blocks"), [(8, 16, 1), (7, 30, 3), (1, 5, 1), (9, 64, 4)])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_linears_round_pad_and_sum_as_the_twin(
    cuda_ops: CudaOps, rows: int, n: int, k: int, row_blocks: int
) -> None:
    x, weight, bias = normal(14, rows, k), normal(15, n, k).bfloat16(), normal(16, n)
    packed = cuda_ops.pack(weight, bias, row_blocks)
    twin = TWIN.pack(weight, bias, row_blocks)
    torch.testing.assert_close(
        cuda_ops.linear_parts(x, packed), TWIN.linear_parts(x, twin), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        cuda_ops.linear(x, packed), TWIN.linear(x, twin), rtol=1e-5, atol=1e-5
    )


def test_a_packed_weight_serves_as_a_table(cuda_ops: CudaOps) -> None:
    weight, ids = normal(17, 10, 16).bfloat16(), torch.tensor([9, 1])
    packed = cuda_ops.pack(weight)
    assert torch.equal(cuda_ops.embed(packed, ids), weight[ids].float())


def test_what_does_not_fit_is_refused(cuda_ops: CudaOps) -> None:
    with pytest.raises(ValueError, match="bfloat16 matrix"):
        cuda_ops.pack(normal(18, 4, 4))
    with pytest.raises(ValueError, match="3 equal blocks"):
        cuda_ops.pack(normal(18, 4, 4).bfloat16(), row_blocks=3)
    with pytest.raises(ValueError, match="x has 5 columns"):
        cuda_ops.linear(normal(19, 2, 5), cuda_ops.pack(normal(18, 4, 4).bfloat16()))
    with pytest.raises(ValueError, match="a tensor is on meta"):
        cuda_ops.add(torch.empty(3, device="meta"), torch.empty(3, device="meta"))
