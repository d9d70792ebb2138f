"""`DraftBlock` by csrc/include/aserve/draft.h: tensors are checked here, indices in the binding."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from aserve import _native
from aserve.core.message import Drafting
from aserve.tensor.addresses import indices, matrix, weight_dtype
from aserve.tensor.blocks import BlockStep, DraftPart, DraftRoots
from aserve.tensor.native_step import KnownPools, addresses_of, norm_or_none, rows_of
from aserve.tensor.ops import KvLayer, Linear
from aserve.tensor.outputs import Outputs
from aserve.tensor.rope import RopeTable
from aserve.tensor.tree import nodes_of

_F32, _I32 = torch.float32, torch.int32


class Shared(Protocol):
    """What all blocks of one `NativeOps` have in common."""

    team: _native.Team
    space: _native.Workspace
    outputs: Outputs


class NativeDraft:
    def __init__(self, blocks: Shared, part: DraftPart) -> None:
        self.blocks, self.hidden, self.vocab = blocks, part.mlp.down.n, part.head.n
        self.takes_embedded = part.norms_H is not None
        attention, mlp, hidden = part.attention, part.mlp, self.hidden
        weights = attention.qkv, attention.out, mlp.gate_up, mlp.down, part.head
        both = (None, None) if part.norms_H is None else part.norms_H
        norms = (
            *(norm_or_none(norm_H, hidden) for norm_H in both),
            norm_or_none(attention.q_norm_D, attention.dim),
            norm_or_none(attention.k_norm_D, attention.dim),
            norm_or_none(mlp.norm_H, hidden),
            norm_or_none(part.norm_H, hidden),
        )
        self.handle = _native.DraftLayer(
            tuple(weight.packed for weight in weights),  # type: ignore[attr-defined]
            norms,
            (attention.heads, attention.kv_heads, attention.dim),
            attention.eps,
            attention.scale,
        )
        fc = None if part.fc is None else part.fc.packed  # type: ignore[attr-defined]
        ids = 0 if part.ids_V is None else indices("ids", part.ids_V, self.vocab)
        self._around = _table(part.table), fc, ids
        self.part = part  # whose tensors have these addresses
        self._pool = KnownPools()

    def grow(
        self, kv: KvLayer, rope: RopeTable, roots: DraftRoots, size: Drafting
    ) -> tuple[Tensor, Tensor]:
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        n, pages_max = roots.page_table_NP.shape
        table, cos_sin = roots.page_table_NP, rope.cos_sin_PR
        if table.dtype is not _I32 or not table.is_contiguous():
            raise ValueError("a page table is int32 and contiguous")
        if cos_sin.dtype is not _F32 or not cos_sin.is_contiguous():
            raise ValueError("a rope table is float32 and contiguous")
        if roots.logits_NV.shape != (n, self.vocab) or roots.hidden_NH.shape != (n, self.hidden):
            raise ValueError(f"{n} roots, rows and logits of others")
        ends = (
            n,
            matrix("hidden", roots.hidden_NH) and roots.hidden_NH.data_ptr(),
            matrix("logits", roots.logits_NV) and roots.logits_NV.data_ptr(),
            table.data_ptr(),
            pages_max,
            indices("lengths", roots.lengths_N, n),
        )
        nodes = nodes_of(size)
        tokens_NT, parents_NT = (np.empty((n, nodes), dtype=np.int32) for _ in range(2))
        _native.draft_grow(
            blocks.team,
            blocks.space,
            self.handle,
            (*self._around, (cos_sin.data_ptr(), *cos_sin.shape)),
            pool,
            (ends, (roots.first_page, roots.pages_each), _noise(roots, n)),
            (size.depth, size.topk, size.tokens),
            (tokens_NT.ctypes.data, parents_NT.ctypes.data),
        )
        return torch.from_numpy(tokens_NT), torch.from_numpy(parents_NT)

    def __call__(
        self,
        embedded_TH: Tensor | None,
        hidden_TH: Tensor,
        kv: KvLayer,
        step: BlockStep,
        ends: tuple[Tensor, BlockStep] | None,
    ) -> tuple[Tensor, Tensor]:
        n_rows, hidden = rows_of(hidden_TH, self.hidden)
        embedded = 0
        if self.takes_embedded:
            if embedded_TH is None or embedded_TH.shape != hidden_TH.shape:
                raise ValueError(f"{n_rows} rows, embeddings of other tokens")
            embedded = rows_of(embedded_TH, self.hidden)[1]
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        given, last = addresses_of(step, hidden_TH), None
        if ends is not None:
            rows_N, end_step = ends
            if rows_N.dtype is not torch.int64 or not rows_N.is_contiguous():
                raise ValueError(f"rows are {rows_N.dtype}: want contiguous int64")
            last = rows_N.data_ptr(), addresses_of(end_step, rows_N)
            n_rows = len(rows_N)
        out_NH = blocks.outputs.empty((n_rows, self.hidden))
        logits_NV = blocks.outputs.empty((n_rows, self.vocab))
        made = out_NH.data_ptr(), logits_NV.data_ptr()
        rows = embedded, hidden
        _native.draft_layer(blocks.team, blocks.space, self.handle, given, pool, rows, last, made)
        return out_NH, logits_NV


def _table(table: Tensor | Linear) -> tuple[object, ...]:
    """As the binding takes embeddings."""
    if not isinstance(table, Tensor):
        return (table.packed,)  # type: ignore[attr-defined]
    is_bf16 = weight_dtype("table", table) is torch.bfloat16
    if table.dim() != 2 or not table.is_contiguous():
        raise ValueError("an embedding table is a contiguous [vocab, hidden]")
    return None, is_bf16, table.data_ptr(), *table.shape


def _noise(roots: DraftRoots, n: int) -> tuple[int, ...] | None:
    noise = roots.noise
    if noise is None:
        return None
    seeds, temperatures = noise.seeds_R, noise.temperatures_R
    for name, x, dtype in (("seeds", seeds, torch.int64), ("temperatures", temperatures, _F32)):
        if x.dtype is not dtype or x.shape != (n,) or not x.is_contiguous():
            raise ValueError(f"{name} are {x.dtype} {tuple(x.shape)}: want {dtype} ({n},)")
    positions = indices("positions", noise.positions_R, n)
    return seeds.data_ptr(), positions, temperatures.data_ptr(), roots.most
