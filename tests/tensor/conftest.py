"""Native operations at every level this machine has, with outputs that start out as poison."""

from collections.abc import Iterator

import pytest
import torch

from aserve import _native
from aserve.tensor.native import NativeOps

LEVELS = ("generic", "avx2", "avx512", "amx")


@pytest.fixture(scope="session")
def team_ops() -> NativeOps:
    return NativeOps(2)


@pytest.fixture(params=LEVELS)
def ops(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, team_ops: NativeOps
) -> Iterator[NativeOps]:
    """Two threads at one level; whatever a kernel leaves unwritten is NaN."""
    before = _native.level()
    if _native.set_level(request.param) != request.param:
        _native.set_level(before)
        pytest.skip(f"this machine has no {request.param}")
    monkeypatch.setattr(team_ops.outputs, "empty", _poisoned)
    yield team_ops
    _native.set_level(before)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return torch.full(tuple(shape), poison, dtype=dtype)
