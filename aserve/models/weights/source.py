"""A checkpoint as a mapping from names to tensors; what every format offers."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

Index = tuple[slice, ...]  # one slice per dimension


class Entry(NamedTuple):
    """`kind` is the format's own word for the type, such as BF16 or Q4_1."""

    shape: tuple[int, ...]
    kind: str
    n_bytes: int


class Source(Protocol):
    """`read` may be called from several threads at once. Closing it ends every tensor it mapped."""

    @property
    def origin(self) -> str:
        """The file or folder, for messages."""
        ...

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, name: str, index: Index, dtype: torch.dtype) -> Tensor:
        """That part of a tensor, rounded to bfloat16 or as float32."""
        ...

    def read_blocks(self, name: str, index: Index) -> Tensor:
        """That part of a matrix whose type is in `blocks.KEPT`, as uint8 [rows, row bytes] of the
        kind that says; columns at multiples of 32. Raises ValueError for one of another type."""
        ...


def auto_dtype(source: Source) -> torch.dtype:
    """float32 if every matrix is float32 on disk, else bfloat16 (norms are often kept float32)."""
    kinds = {entry.kind for entry in source.entries.values() if len(entry.shape) > 1}
    return torch.float32 if kinds <= {"F32", "F64"} else torch.bfloat16
