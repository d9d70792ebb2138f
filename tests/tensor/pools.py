"""Paged pools with known contents, for attention and KV tests. Unused slots are NaN."""

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.tensor.ops import SCALE_BYTES, Attend, KvLayer, Ops


@dataclasses.dataclass
class Keys:
    """One sequence's keys, values and queries by position."""

    q_LHD: Tensor
    k_LGD: Tensor
    v_LGD: Tensor

    def __len__(self) -> int:
        return len(self.k_LGD)


def random_keys(seed: int, length: int, heads: int, kv_heads: int, dim: int) -> Keys:
    generator = torch.Generator().manual_seed(seed)
    return Keys(
        torch.randn(length, heads, dim, generator=generator),
        torch.randn(length, kv_heads, dim, generator=generator),
        torch.randn(length, kv_heads, dim, generator=generator),
    )


class Pool:
    """Pages handed out in a shuffled order; `write` fills positions of a sequence."""

    def __init__(
        self, ops: Ops, sequences: Sequence[Keys], page_size: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.ops, self.page_size, self.sequences = ops, page_size, list(sequences)
        _, kv_heads, dim = sequences[0].k_LGD.shape
        counts = [-(-len(keys) // page_size) for keys in sequences]
        pages = sum(counts) + 3
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
        self.table_NP = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        at = 0
        for n, count in enumerate(counts):
            self.table_NP[n, :count] = order[at : at + count]
            at += count
        stored = dim + SCALE_BYTES if dtype == torch.int8 else dim
        shape = (pages, page_size, kv_heads, stored)
        self.kv = KvLayer(_poison(shape, dtype), _poison(shape, dtype))

    def slots(self, n: int, begin: int, end: int) -> Tensor:
        place = torch.arange(begin, end)
        page = self.table_NP[n].long()[place // self.page_size]
        return (page * self.page_size + place % self.page_size).int()

    def write(self, n: int, begin: int, end: int) -> None:
        keys = self.sequences[n]
        self.ops.kv_append(
            keys.k_LGD[begin:end], keys.v_LGD[begin:end], self.kv, self.slots(n, begin, end)
        )

    def attend(self, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Attention of rows [begin, end) of sequence n, for each (n, begin, end)."""
        return self.attend_at([(n, range(begin, end), end) for n, begin, end in rows])

    def attend_at(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> Tensor:
        """Attention of rows at some positions, for each (n, positions, kv_len)."""
        q = torch.cat([self.sequences[n].q_LHD[list(at)] for n, at, _ in rows])
        return self.ops.attention(q, self.kv, self.step_at(rows), q.shape[2] ** -0.5)

    def step(self, rows: Sequence[tuple[int, int, int]]) -> Attend:
        return self.step_at([(n, range(begin, end), end) for n, begin, end in rows])

    def step_at(self, rows: Sequence[tuple[int, Sequence[int], int]]) -> Attend:
        starts = [0, *itertools.accumulate(len(at) for _, at, _ in rows)]
        positions = [place for _, at, _ in rows for place in at]
        return Attend(
            slots_T=torch.cat([self.slots(n, 0, kv_len) for n, _, kv_len in rows]),
            positions_T=torch.tensor(positions, dtype=torch.int32),
            page_table_NP=self.table_NP[[n for n, _, _ in rows]].contiguous(),
            row_start_M=torch.tensor(starts, dtype=torch.int32),
            kv_len_N=torch.tensor([kv_len for _, _, kv_len in rows], dtype=torch.int32),
        )


def _poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.full(shape, -1, dtype=dtype)  # a scale of such bytes is a NaN
    return torch.full(shape, float("nan"), dtype=dtype)
