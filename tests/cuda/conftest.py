"""`CudaOps` over the kernels compiled for the host, both ways round; outputs begin as poison."""

import pathlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from aserve.tensor.cuda import CudaOps, open_cuda
from tests.cuda.host_build import build_host_library, turn_round


class PoisonedOps(CudaOps):
    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return torch.full(tuple(shape), poison, dtype=dtype)


@pytest.fixture(scope="session")
def host_library(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_host_library(tmp_path_factory.mktemp("cuda") / "libhost.so")


@pytest.fixture(params=["forwards", "backwards"])
def cuda_ops(request: pytest.FixtureRequest, host_library: pathlib.Path) -> Iterator[CudaOps]:
    """In either order of threads and blocks: neither may matter."""
    plain = open_cuda(host_library)
    turn_round(host_library, request.param == "backwards")
    yield PoisonedOps(plain.library, plain.device)
    turn_round(host_library, False)
