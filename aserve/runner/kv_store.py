"""One pool of pages for each region the model declares. Knows sizes and dtypes, never sequences."""

import os
from collections.abc import Sequence

import torch

from aserve.core.config import Cache
from aserve.errors import ConfigError
from aserve.models.regions import Region
from aserve.tensor.ops import KvLayer

KV_SHARE = 0.3  # of the memory that is free at start; the rest is for weights' copies and peaks


def page_bytes(regions: Sequence[Region], page_size: int) -> int:
    return sum(len(region.layers) * region.item_bytes * page_size for region in regions)
