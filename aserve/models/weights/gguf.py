"""GGUF checkpoints: a tensor is read as blocks, or dequantised as the `gguf` package does it."""

import mmap
from typing import NamedTuple

import gguf.quants
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from aserve.errors import ModelError
from aserve.models.weights import gguf_names
from aserve.models.weights.blocks import KEPT, columns, q4_1_of_q4_k
from aserve.models.weights.source import Entry, Index
from aserve.text.gguf_file import GgufFile

CHUNK_VALUES = 1 << 18
KINDS = {
    *(Kind.F32, Kind.F16, Kind.BF16),
    *(Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K),
}
PAGE_BYTES = mmap.ALLOCATIONGRANULARITY


class Place(NamedTuple):
    """Where a tensor stands: by its GGUF name, and its number in a stack of experts."""

    name: str
    expert: int | None
    swapped_heads: int  # its rows stand as interleaved rotary pairs of so many heads


class GgufSource:
    def __init__(self, file: GgufFile) -> None:
        config = gguf_names.config_of(file)
        arch = config["architectures"][0]
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"] or config["num_attention_heads"],
        }
        self.origin = file.path
        self.config = config
        self.entries: dict[str, Entry] = {}
        self._file = file
        self._places: dict[str, Place] = {}
        if (n_parts := file.metadata.get("split.count", 1)) != 1:
            raise ModelError(
                f"{file.path} is one of {n_parts} parts: join them first (llama-gguf-split --merge)"
            )
        refused = sorted({t.kind.name for t in file.tensors.values() if t.kind not in KINDS})
        if refused:
            known = ", ".join(kind.name for kind in sorted(KINDS))
            raise ModelError(f"{file.path} uses {', '.join(refused)}, not supported: know {known}")
        for gguf_name, tensor in file.tensors.items():
            for name, expert in gguf_names.renamed(gguf_name, arch, tensor.shape[0]):
                stacked = expert is not None
                shape = tensor.shape[1:] if stacked else tensor.shape
                n_bytes = tensor.n_bytes // (tensor.shape[0] if stacked else 1)
                self.entries[name] = Entry(shape, tensor.kind.name, n_bytes)
                # llama.cpp stores q and k of this architecture for interleaved rotary pairs.
                swapped = heads.get(name.split(".")[-2:][0], 0) if file.arch == "llama" else 0
                self._places[name] = Place(gguf_name, expert, swapped)

    def read(self, name: str, index: Index, dtype: torch.dtype) -> Tensor:
        place, shape = self._places[name], self.entries[name].shape
        kind = self._file.tensors[place.name].kind
        if len(shape) < 2:
            values = _values(self._file.raw(place.name), kind)
            if place.swapped_heads:
                values = values[_half_split(shape[0], place.swapped_heads)]
            return values.reshape(shape)[index].to(dtype)
        # A row is whole blocks, so rows are chosen before dequantising, columns after; a few rows
        # at a time, so that float32 never leaves the cache.
        raw = self._rows(name, index[0])
        step = max(1, CHUNK_VALUES // shape[-1])
        out = torch.empty((len(raw), *(part.stop - part.start for part in index[1:])), dtype=dtype)
        for start in range(0, len(raw), step):
            rows = slice(start, start + step)
            out[rows] = _values(raw[rows], kind)[(slice(None), *index[1:])]
        self._release(name)
        return out

    def read_blocks(self, name: str, index: Index) -> Tensor:
        stored = self.entries[name].kind
        if stored not in KEPT:
            raise ValueError(f"is {stored}, which has no blocks")
        rows, part = index
        raw = self._rows(name, rows)
        blocks = q4_1_of_q4_k(raw) if stored == "Q4_K" else raw
        blocks = np.array(columns(blocks, KEPT[stored], part), order="C")  # not of the file's pages
        self._release(name)
        return torch.from_numpy(blocks)

    def _rows(self, name: str, rows: slice) -> np.ndarray:
        """uint8 [rows, row bytes]: of the file, or a copy where their order differs."""
        place = self._places[name]
        raw = self._file.raw(place.name)
        if place.expert is not None:
            raw = raw[place.expert]
        if place.swapped_heads:
            return raw[_half_split(len(raw), place.swapped_heads)[rows]]
        return raw[rows]

    def _release(self, name: str) -> None:
        """Let go of the file's pages under a matrix: what was read of it is elsewhere by now, and
        the next reader gets them again from the system's cache."""
        place, n_bytes = self._places[name], self.entries[name].n_bytes
        start = self._file.tensors[place.name].offset + (place.expert or 0) * n_bytes
        page = start // PAGE_BYTES * PAGE_BYTES
        if isinstance(mapped := self._file.data.base, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED, page, start + n_bytes - page)


def _half_split(n_rows: int, heads: int) -> np.ndarray:
    """The order in which rows (2i, 2i + 1) of each head are rows i and i + half."""
    order = np.arange(n_rows)
    if n_rows % (2 * heads):
        return order  # misshapen: the check of all shapes says so
    return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _values(raw: np.ndarray, kind: Kind) -> Tensor:
    if kind == Kind.BF16:
        return torch.from_numpy(np.ascontiguousarray(raw).view(np.int16)).view(torch.bfloat16)
    if kind in (Kind.F32, Kind.F16):
        dtype = np.float32 if kind == Kind.F32 else np.float16
        return torch.from_numpy(np.ascontiguousarray(raw).view(dtype)).float()
    # gguf.dequantize would take 16 rows at a time, which for rows of this length is slow.
    quantisation = getattr(gguf.quants, kind.name)
    blocks = raw.reshape(-1, quantisation.type_size)
    return torch.from_numpy(quantisation.dequantize_blocks(blocks).reshape(*raw.shape[:-1], -1))
