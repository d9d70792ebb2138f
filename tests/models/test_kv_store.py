"""How many pages a rank makes."""

import pytest
import torch

from aserve.core.config import Cache
from aserve.models.regions import kv_region
from aserve.runner import kv_store
from aserve.runner.kv_store import pages_for

TINY = kv_region((0,), 1, 2, torch.bfloat16)


@pytest.mark.parametrize("page_size", [16, 24, 1000])
@pytest.mark.parametrize("kv_tokens", [1 << 31, None])
def test_every_slot_has_a_number_that_kernels_take(
    page_size: int, kv_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_store, "memory_free_bytes", lambda: 1 << 44)
    cache = Cache(page_size=page_size, kv_tokens=kv_tokens, kv_mib_max=1 << 24)
    slots = pages_for([TINY], cache, tokens_max=1 << 40) * page_size
    assert 2**31 - page_size <= slots <= 2**31
