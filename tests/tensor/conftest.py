"""Native operations at every level this machine has, with outputs that start out as poison."""

from collections.abc import Iterator

import pytest
import torch

from aserve import _native
from aserve.tensor import tree_native
from aserve.tensor.native import NativeOps
from aserve.tensor.tree import Trees
from aserve.tensor.tree_native import NativeTrees
from aserve.tensor.tree_reference import ReferenceTrees

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
    monkeypatch.setattr(tree_native, "_empty", _poisoned)
    yield team_ops
    _native.set_level(before)


@pytest.fixture(name="native")
def native_trees(ops: NativeOps) -> NativeTrees:
    return NativeTrees(ops.team)


@pytest.fixture(name="trees", params=["native", "twin"])
def either_trees(request: pytest.FixtureRequest, ops: NativeOps) -> Trees:
    return NativeTrees(ops.team) if request.param == "native" else ReferenceTrees()


def _poisoned(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    whole = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.full(whole, poison, dtype=dtype)
