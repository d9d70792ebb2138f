"""A matrix of any type as blocks of a given kind: as the file has them, or made of its numbers."""

import numpy as np
import torch
from torch import Tensor

from aserve.errors import ModelError
from aserve.models.weights.blocks import KEPT, q4_1_of_q4_0, row_bytes
from aserve.models.weights.quantise import to_q4_1, to_q8_0
from aserve.models.weights.source import Index, Source
from aserve.tensor.ops import BlockKind

CHUNK_VALUES = 1 << 15  # float32 of these and what is made of them stay in the cache


def read_blocks(source: Source, name: str, index: Index, kind: BlockKind) -> Tensor:
    """uint8 [rows, row bytes]. Raises ModelError, which names the tensor, for what cannot be."""
    try:
        stored = KEPT.get(source.entries[name].kind)
        if stored == kind:
            return source.read_blocks(name, index)
        if (stored, kind) == ("Q4_0", "Q4_1"):
            return torch.from_numpy(q4_1_of_q4_0(source.read_blocks(name, index).numpy()))
        return _quantised(source, name, index, kind)
    except ValueError as error:
        raise ModelError(f"{source.origin}: {name} {error}; --weights bf16 takes it") from error


def _quantised(source: Source, name: str, index: Index, kind: BlockKind) -> Tensor:
    """A few rows at a time."""
    rows, columns = index
    k = columns.stop - columns.start
    out = np.empty((rows.stop - rows.start, row_bytes(kind, k)), np.uint8)
    convert = to_q8_0 if kind == "Q8_0" else to_q4_1
    step = max(1, CHUNK_VALUES // k)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        values = source.read(name, (slice(start, stop), columns), torch.float32).numpy()
        out[start - rows.start : stop - rows.start] = convert(values)
    return torch.from_numpy(out)
