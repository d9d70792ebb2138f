"""The default model, whole: logits and KV over fused blocks are those of the operations."""

import pathlib

import pytest
import torch

from aserve import _native
from aserve.models.registry import load_model
from aserve.tensor.ops import open_ops
from tests.models.paged import Paged

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("level", ["avx512", "amx"])
def test_logits_and_kv_have_the_bits_of_the_operations(
    smollm2_path: pathlib.Path, level: str
) -> None:
    before = _native.level()
    if _native.set_level(level) != level:
        _native.set_level(before)
        pytest.skip(f"this machine has no {level}")
    text = torch.randint(3, 40_000, (90,), generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for fused in (True, False):
        paged = Paged(load_model(smollm2_path, ops=open_ops("native", 2, fused)))
        logits = paged.step((0, text[:70]), (1, text[:5]))
        logits += paged.step((1, text[5:6]), (0, text[70:71]))
        logits += paged.step((0, text[71:]))
        made.append((logits, paged.kv))
    _native.set_level(before)
    (fused_logits, fused_kv), (plain_logits, plain_kv) = made
    assert all(torch.equal(a, b) for a, b in zip(fused_logits, plain_logits, strict=True))
    for a, b in zip(fused_kv, plain_kv, strict=True):
        assert torch.equal(a.k_PSHD.nan_to_num(1e9), b.k_PSHD.nan_to_num(1e9))
        assert torch.equal(a.v_PSHD.nan_to_num(1e9), b.v_PSHD.nan_to_num(1e9))
