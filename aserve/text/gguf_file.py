"""The head of a GGUF file: its metadata and its table of tensors. Dequantises nothing.

Format: ggml's docs/gguf.md, versions 2 and 3, little-endian. The `gguf` package reads the same, but
makes two numpy arrays for every token of a vocabulary, which takes seconds, and trusts lengths.
"""

import os
import struct
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from aserve.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DIMENSIONS_MAX = 4
ENTRIES_MAX = 1 << 20  # keys, and tensors
DEPTH_MAX = 4  # arrays in arrays

STRING, ARRAY = 8, 9
SCALARS = {
    **{0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f"},
    **{7: "<?", 10: "<Q", 11: "<q", 12: "<d"},
}
LENGTH = struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """`shape` is row-major (ggml's reversed); `offset` counts from the start of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


class GgufFile(NamedTuple):
    path: str
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: np.ndarray  # uint8, the whole file, memory-mapped (copy on write)

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def raw(self, name: str) -> np.ndarray:
        """uint8 [..., bytes of a row]: a tensor's blocks as they stand in the file."""
        tensor = self.tensors[name]
        flat = self.data[tensor.offset : tensor.offset + tensor.n_bytes]
        return flat.reshape(*tensor.shape[:-1], -1)


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the head of the file. Raises ModelError if it is no GGUF file, is cut off or corrupt."""
    path = os.fspath(path)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ModelError(f"cannot read {path}: {error}") from error
    head = _Head(memoryview(data), path)
    try:
        return _read(head, data)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelError(f"{path} is cut off or corrupt at byte {head.at}: {error}") from error


def _read(head: "_Head", data: np.ndarray) -> GgufFile:
    if head.take(4) != MAGIC:
        raise ModelError(f"{head.path} is not a GGUF file: it does not start with 'GGUF'")
    version = head.scalar(4)
    if version not in VERSIONS:
        raise ModelError(f"{head.path} is GGUF version {version}: know {VERSIONS}, little-endian")
    n_tensors, n_keys = head.count(ENTRIES_MAX), head.count(ENTRIES_MAX)
    metadata = {}
    for _ in range(n_keys):
        key = head.string()
        if key in metadata:
            raise ValueError(f"key {key!r} stands there twice")
        metadata[key] = head.value(head.scalar(4), DEPTH_MAX)
    found = [head.tensor() for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        raise ValueError(f"alignment is {alignment!r}")
    start = -(-head.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in found:
        if name in tensors:
            raise ValueError(f"tensor {name!r} stands there twice")
        placed = tensor._replace(offset=start + tensor.offset)
        if placed.offset % 8 or placed.offset + placed.n_bytes > len(data):
            raise ValueError(
                f"tensor {name!r} ends at byte {placed.offset + placed.n_bytes}, "
                f"the file at {len(data)}; copy it again"
            )
        tensors[name] = placed
    return GgufFile(head.path, metadata, tensors, data)


class _Head:
    """A cursor that cannot leave the file."""

    def __init__(self, view: memoryview, path: str) -> None:
        self.view = view
        self.path = path
        self.at = 0

    def take(self, n_bytes: int) -> bytes:
        if n_bytes > len(self.view) - self.at:
            raise ValueError(f"{n_bytes} bytes wanted, {len(self.view) - self.at} left")
        self.at += n_bytes
        return bytes(self.view[self.at - n_bytes : self.at])

    def scalar(self, kind: int) -> Any:
        form = SCALARS[kind]
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return value

    def count(self, count_max: int) -> int:
        count: int = self.scalar(10)
        if count > count_max:
            raise ValueError(f"a count of {count}, at most {count_max} are possible")
        return count

    def string(self) -> str:
        return self.take(self.count(len(self.view))).decode()

    def value(self, kind: int, depth: int) -> Any:
        if kind in SCALARS:
            return self.scalar(kind)
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth == 0:
            raise ValueError(f"unknown kind of value {kind}")
        inner, n_items = self.scalar(4), self.count(len(self.view))
        if inner == STRING:
            return self._strings(n_items)
        if inner in SCALARS:
            form = SCALARS[inner]
            return np.frombuffer(self.take(n_items * struct.calcsize(form)), form).tolist()
        return [self.value(inner, depth - 1) for _ in range(n_items)]

    def _strings(self, n_items: int) -> list[str]:
        # The one long loop: a vocabulary and its merges are 100,000 strings and more.
        view, at, unpack = self.view, self.at, LENGTH.unpack_from
        strings = []
        for _ in range(n_items):
            start = at + 8
            at = start + unpack(view, at)[0]
            strings.append(str(view[start:at], "utf-8"))
        if at > len(view):
            raise ValueError("a string runs past the end of the file")
        self.at = at
        return strings

    def tensor(self) -> tuple[str, GgufTensor]:
        name = self.string()
        n_dims = self.scalar(4)
        if not 1 <= n_dims <= DIMENSIONS_MAX:
            raise ValueError(f"tensor {name!r} has {n_dims} dimensions")
        shape = tuple(self.scalar(10) for _ in range(n_dims))[::-1]
        kind = GGMLQuantizationType(self.scalar(4))
        offset: int = self.scalar(10)
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_len:
            raise ValueError(f"tensor {name!r}: {kind.name} rows cannot be {shape[-1]} long")
        n_items = 1
        for size in shape:
            n_items *= size
        return name, GgufTensor(kind, shape, offset, n_items // block_len * block_bytes)
