"""One pool of pages for each region the model declares. Knows sizes and dtypes, never sequences."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from aserve.core.config import Cache
from aserve.errors import ConfigError
from aserve.models.regions import Region
from aserve.tensor.ops import KvLayer

MEMORY_SHARE = 0.4  # of what is free once the weights are in memory
PAGES_MIN = 2
SLOTS_MAX = 1 << 31  # of a pool: kernels take the number of a slot as int32


class KvStore:
    """`layers[i]` is layer i's view into its region's pool; memory is touched as pages are used."""

    def __init__(self, regions: Sequence[Region], page_size: int, pages_total: int) -> None:
        self.page_size = page_size
        self.nbytes = 0
        layers: dict[int, KvLayer] = {}
        for region in regions:
            assert region.per == "token", region
            # Page before layer: what is in use is one span, of which huge pages waste next to none.
            shape = (pages_total, len(region.layers), 2, page_size, region.heads, region.stored_dim)
            pool_bytes = len(region.layers) * region.item_bytes * page_size * pages_total
            # numpy asks for zeroed memory that costs nothing until it is written.
            pool = torch.from_numpy(_zeros(pool_bytes)).view(region.dtype)
            for place, layer in enumerate(region.layers):
                keys, values = pool.view(shape)[:, place].unbind(1)
                layers[layer] = KvLayer(keys, values)
            self.nbytes += pool_bytes
        self.layers = [layers[layer] for layer in sorted(layers)]


def _zeros(n_bytes: int) -> npt.NDArray[np.uint8]:
    try:
        return np.zeros(n_bytes, dtype=np.uint8)
    except MemoryError as error:
        raise ConfigError(
            f"the KV pool would take {n_bytes >> 20} MiB, which this machine will not give: lower "
            "cache.kv_tokens or cache.kv_mib_max"
        ) from error


def pages_for(regions: Sequence[Region], cache: Cache, *, tokens_max: int) -> int:
    """How many pages to make: `cache.kv_tokens`, or a bounded share of the free memory.

    `tokens_max` is what all sequences that may run at once can ever fill.
    """
    page_bytes = cache.page_size * sum(len(region.layers) * region.item_bytes for region in regions)
    if cache.kv_tokens is not None:
        pages = -(-cache.kv_tokens // cache.page_size)
        asked = f"cache.kv_tokens {cache.kv_tokens}"
    else:
        budget = min(cache.kv_mib_max << 20, int(memory_free_bytes() * MEMORY_SHARE))
        pages = min(budget // page_bytes, -(-tokens_max // cache.page_size))
        asked = f"cache.kv_mib_max {cache.kv_mib_max} and the free memory"
    pages = min(pages, SLOTS_MAX // cache.page_size)
    if pages < PAGES_MIN:
        raise ConfigError(
            f"{asked} allow {pages} pages of {page_bytes} bytes; at least {PAGES_MIN} are needed"
        )
    return pages


def memory_free_bytes() -> int:
    """What this process may still take: of the machine, or of its control group if that is less."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    meminfo = pathlib.Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = (group / "memory.current").read_text().strip()
    except OSError:
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - int(used)))
