"""`Blocks` by csrc/include/aserve/block.h: tensors are checked here, indices in the binding.

All blocks of one `NativeOps` share a workspace, so their calls take turns, as those of `Ops` do.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve import _native
from aserve.core.message import Drafting
from aserve.tensor.addresses import (
    indices,
    kv_type,
    matrix,
    norm_weight,
    pages,
    require_same,
    tree_paths,
    weight_dtype,
)
from aserve.tensor.blocks import (
    AttentionBlock,
    AttentionPart,
    BlockStep,
    DraftPart,
    DraftRoots,
    MlpBlock,
    MlpPart,
)
from aserve.tensor.ops import Attend, KvLayer, Linear
from aserve.tensor.outputs import Outputs
from aserve.tensor.rope import RopeTable
from aserve.tensor.tree import nodes_of

_F32, _I32 = torch.float32, torch.int32

Pool = tuple[object, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NativeStep:
    """Addresses of a step, and the tensors behind them."""

    n_rows: int
    addresses: tuple[object, ...]
    attend: Attend
    rope: RopeTable


class NativeBlocks:
    def __init__(self, team: _native.Team, outputs: Outputs) -> None:
        self.team, self.space, self.outputs = team, _native.Workspace(), outputs

    def step(self, attend: Attend, rope: RopeTable) -> NativeStep:
        n_rows, sequences = attend.positions_T.shape[0], attend.kv_len_N.shape[0]
        page_table, table = attend.page_table_NP, rope.cos_sin_PR
        if page_table.dtype is not _I32 or not page_table.is_contiguous():
            raise ValueError("a page table is int32 and contiguous")
        if page_table.dim() != 2 or page_table.shape[0] != sequences:
            raise ValueError(f"{sequences} sequences, a page table of {tuple(page_table.shape)}")
        if table.dtype is not _F32 or not table.is_contiguous():
            raise ValueError("a rope table is float32 and contiguous")
        who = (
            sequences,
            indices("row_start", attend.row_start_M, sequences + 1),
            indices("positions", attend.positions_T, n_rows),
            indices("kv_len", attend.kv_len_N, sequences),
            page_table.data_ptr(),
            page_table.shape[1],
            *tree_paths(attend.tree, n_rows),
        )
        slots = indices("slots", attend.slots_T, n_rows)
        addresses = (n_rows, slots, who, table.data_ptr(), *table.shape)
        return NativeStep(n_rows, addresses, attend, rope)

    def attention(self, part: AttentionPart) -> "NativeAttention":
        return NativeAttention(self, part)

    def mlp(self, part: MlpPart) -> "NativeMlp":
        return NativeMlp(self, part)

    def draft(self, part: DraftPart) -> "NativeDraft":
        return NativeDraft(self, part)

    def stack(
        self,
        layers: Sequence[tuple[AttentionBlock, MlpBlock]],
        norm_H: Tensor | None,
        eps: float,
    ) -> "NativeStack":
        return NativeStack(self, layers, norm_H, eps)


class NativeAttention:
    def __init__(self, blocks: NativeBlocks, part: AttentionPart) -> None:
        self.blocks, self.outputs, self.part = blocks, blocks.outputs, part
        self.handle = _native.AttentionBlock(
            part.qkv.packed,  # type: ignore[attr-defined]
            part.out.packed,  # type: ignore[attr-defined]
            (
                _norm(part.norm_H, part.qkv.k),
                _norm(part.q_norm_D, part.dim),
                _norm(part.k_norm_D, part.dim),
            ),
            (part.heads, part.kv_heads, part.dim),
            part.eps,
            part.scale,
        )
        self._pool = KnownPools()

    def whole(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        return self._run(x_TH, added_TH, kv, step, self.outputs.empty(x_TH.shape))

    def parts(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        out_BTH = self.outputs.empty((self.part.out.row_blocks, *x_TH.shape))
        return self._run(x_TH, added_TH, kv, step, out_BTH)

    def attended(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep
    ) -> tuple[Tensor, Tensor]:
        total_TH, stream = _stream(self.outputs, x_TH, added_TH, self.part.qkv.k)
        out_TK = self.outputs.empty((len(x_TH), self.part.out.k))
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        given = _addresses(step, x_TH)
        _native.attend_block(
            blocks.team, blocks.space, self.handle, given, pool, stream, out_TK.data_ptr()
        )
        return total_TH, out_TK

    def _run(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        total_TH, stream = _stream(self.outputs, x_TH, added_TH, self.part.qkv.k)
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        given, is_parts = _addresses(step, x_TH), out.dim() == 3
        _native.attention_block(
            blocks.team, blocks.space, self.handle, given, pool, stream, is_parts, out.data_ptr()
        )
        return total_TH, out


class NativeMlp:
    def __init__(self, blocks: NativeBlocks, part: MlpPart) -> None:
        self.blocks, self.outputs, self.part = blocks, blocks.outputs, part
        self.handle = _native.MlpBlock(
            part.gate_up.packed,  # type: ignore[attr-defined]
            part.down.packed,  # type: ignore[attr-defined]
            _norm(part.norm_H, part.gate_up.k),
            part.eps,
        )

    def whole(self, x_TH: Tensor, added_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(x_TH, added_TH, self.outputs.empty(x_TH.shape))

    def parts(self, x_TH: Tensor, added_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(
            x_TH, added_TH, self.outputs.empty((self.part.down.row_blocks, *x_TH.shape))
        )

    def gated(self, normed_TH: Tensor) -> Tensor:
        return self._gated(normed_TH, self.outputs.empty(normed_TH.shape))

    def gated_parts(self, normed_TH: Tensor) -> Tensor:
        return self._gated(
            normed_TH, self.outputs.empty((self.part.down.row_blocks, *normed_TH.shape))
        )

    def _run(self, x_TH: Tensor, added_TH: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        total_TH, stream = _stream(self.outputs, x_TH, added_TH, self.part.gate_up.k)
        blocks, is_parts = self.blocks, out.dim() == 3
        _native.mlp_block(
            blocks.team, blocks.space, self.handle, len(x_TH), stream, is_parts, out.data_ptr()
        )
        return total_TH, out

    def _gated(self, x_TH: Tensor, out: Tensor) -> Tensor:
        part, is_parts = self.part, out.dim() == 3
        m, k = matrix("x", x_TH)
        _native.gated(
            self.blocks.team,
            part.gate_up.packed,  # type: ignore[attr-defined]
            part.down.packed,  # type: ignore[attr-defined]
            x_TH.data_ptr(),
            m,
            k,
            out.data_ptr(),
            is_parts,
        )
        return out


class NativeStack:
    def __init__(
        self,
        blocks: NativeBlocks,
        layers: Sequence[tuple[AttentionBlock, MlpBlock]],
        norm_H: Tensor | None,
        eps: float,
    ) -> None:
        pairs = []
        for attention, mlp in layers:
            assert isinstance(attention, NativeAttention)
            assert isinstance(mlp, NativeMlp)
            pairs.append((attention, mlp))
        self.blocks, self.hidden = blocks, pairs[0][0].part.qkv.k
        norm = _norm(norm_H, self.hidden)
        handles = [(attention.handle, mlp.handle) for attention, mlp in pairs]
        self.handle = _native.Stack(handles, norm, eps)
        self._pools = KnownPools()
        self._captures = Outputs()  # large ones live as long as what leaves the stack: own memory

    def __call__(self, x_TH: Tensor, kv: Sequence[KvLayer], step: BlockStep) -> Tensor:
        return self._run(x_TH, kv, step, ())

    def capturing(
        self, x_TH: Tensor, kv: Sequence[KvLayer], step: BlockStep, layers: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        entering = self._captures.empty((len(layers), *x_TH.shape)).unbind(0)
        captures = tuple((n, x.data_ptr()) for n, x in zip(layers, entering, strict=True))
        if not len(x_TH):  # no rows have no address
            captures = ()
        return self._run(x_TH, kv, step, captures), entering

    def _run(
        self, x_TH: Tensor, kv: Sequence[KvLayer], step: BlockStep, captures: tuple[object, ...]
    ) -> Tensor:
        _, x = _rows(x_TH, self.hidden)
        blocks, out_TH = self.blocks, self.blocks.outputs.empty(x_TH.shape)
        given, pools = _addresses(step, x_TH), self._pools.of(kv)
        _native.run_stack(
            blocks.team, blocks.space, self.handle, given, pools, captures, x, out_TH.data_ptr()
        )
        return out_TH


class NativeDraft:
    def __init__(self, blocks: NativeBlocks, part: DraftPart) -> None:
        self.blocks, self.hidden, self.vocab = blocks, part.mlp.down.n, part.head.n
        self.takes_embedded = part.norms_H is not None
        attention, mlp, hidden = part.attention, part.mlp, self.hidden
        weights = attention.qkv, attention.out, mlp.gate_up, mlp.down, part.head
        both = (None, None) if part.norms_H is None else part.norms_H
        norms = (
            *(_norm(norm_H, hidden) for norm_H in both),
            _norm(attention.q_norm_D, attention.dim),
            _norm(attention.k_norm_D, attention.dim),
            _norm(mlp.norm_H, hidden),
            _norm(part.norm_H, hidden),
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
        n_rows, hidden = _rows(hidden_TH, self.hidden)
        embedded = 0
        if self.takes_embedded:
            if embedded_TH is None or embedded_TH.shape != hidden_TH.shape:
                raise ValueError(f"{n_rows} rows, embeddings of other tokens")
            embedded = _rows(embedded_TH, self.hidden)[1]
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        given, last = _addresses(step, hidden_TH), None
        if ends is not None:
            rows_N, end_step = ends
            if rows_N.dtype is not torch.int64 or not rows_N.is_contiguous():
                raise ValueError(f"rows are {rows_N.dtype}: want contiguous int64")
            last = rows_N.data_ptr(), _addresses(end_step, rows_N)
            n_rows = len(rows_N)
        out_NH = blocks.outputs.empty((n_rows, self.hidden))
        logits_NV = blocks.outputs.empty((n_rows, self.vocab))
        made = out_NH.data_ptr(), logits_NV.data_ptr()
        rows = embedded, hidden
        _native.draft_layer(blocks.team, blocks.space, self.handle, given, pool, rows, last, made)
        return out_NH, logits_NV


class KnownPools:
    """What the binding takes of the pools of layers, checked again only when they are others."""

    def __init__(self) -> None:
        self._layers: tuple[KvLayer, ...] = ()
        self._pools: tuple[Pool, ...] = ()

    def of(self, kv: Sequence[KvLayer]) -> tuple[Pool, ...]:
        known = self._layers
        if len(kv) != len(known) or any(a is not b for a, b in zip(kv, known, strict=True)):
            self._pools = tuple(_pool(layer) for layer in kv)
            self._layers = tuple(kv)
        return self._pools


def _pool(layer: KvLayer) -> Pool:
    k, v = layer.k_PSHD, layer.v_PSHD
    if k.dtype is not v.dtype:
        raise ValueError(f"k pages are {k.dtype}, v pages {v.dtype}")
    return kv_type(k), k.data_ptr(), v.data_ptr(), pages(k), pages(v)


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


def _norm(weight_H: Tensor | None, n: int) -> int:
    return 0 if weight_H is None else norm_weight(weight_H, n)


def _addresses(step: BlockStep, x_TH: Tensor) -> tuple[object, ...]:
    assert isinstance(step, NativeStep)
    if step.n_rows != x_TH.shape[0]:
        raise ValueError(f"{x_TH.shape[0]} rows in a step of {step.n_rows}")
    return step.addresses


def _rows(x_TH: Tensor, hidden: int) -> tuple[int, int]:
    n_rows, columns = matrix("x", x_TH)
    if columns != hidden:
        raise ValueError(f"x has {columns} columns, the block takes {hidden}")
    return n_rows, x_TH.data_ptr()


def _stream(
    outputs: Outputs, x_TH: Tensor, added_TH: Tensor | None, hidden: int
) -> tuple[Tensor, tuple[int, int, int]]:
    """(x + added, which is still to be computed; the addresses of x, added and that)."""
    _, x = _rows(x_TH, hidden)
    if added_TH is None:
        return x_TH, (x, 0, 0)
    require_same("x", x_TH, "added", added_TH)
    total_TH = outputs.empty(x_TH.shape)
    return total_TH, (x, added_TH.data_ptr(), total_TH.data_ptr())
