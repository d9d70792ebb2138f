"""`Blocks` by csrc/include/aserve/block.h: tensors are checked here, indices in the binding.

All blocks of one `NativeOps` share a workspace, so their calls take turns, as those of `Ops` do.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aserve import _native
from aserve.tensor.addresses import indices, matrix, require_same, tree_paths
from aserve.tensor.blocks import (
    AttentionBlock,
    AttentionPart,
    BlockStep,
    DraftPart,
    MlpBlock,
    MlpPart,
)
from aserve.tensor.native_draft import NativeDraft
from aserve.tensor.native_step import (
    KnownPools,
    NativeStep,
    addresses_of,
    norm_or_none,
    rows_of,
)
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.outputs import Outputs
from aserve.tensor.rope import RopeTable

_F32, _I32 = torch.float32, torch.int32


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

    def draft(self, part: DraftPart) -> NativeDraft:
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
                norm_or_none(part.norm_H, part.qkv.k),
                norm_or_none(part.q_norm_D, part.dim),
                norm_or_none(part.k_norm_D, part.dim),
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
        given = addresses_of(step, x_TH)
        _native.attend_block(
            blocks.team, blocks.space, self.handle, given, pool, stream, out_TK.data_ptr()
        )
        return total_TH, out_TK

    def _run(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: BlockStep, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        total_TH, stream = _stream(self.outputs, x_TH, added_TH, self.part.qkv.k)
        blocks, (pool,) = self.blocks, self._pool.of((kv,))
        given, is_parts = addresses_of(step, x_TH), out.dim() == 3
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
            norm_or_none(part.norm_H, part.gate_up.k),
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
        norm = norm_or_none(norm_H, self.hidden)
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
        _, x = rows_of(x_TH, self.hidden)
        blocks, out_TH = self.blocks, self.blocks.outputs.empty(x_TH.shape)
        given, pools = addresses_of(step, x_TH), self._pools.of(kv)
        _native.run_stack(
            blocks.team, blocks.space, self.handle, given, pools, captures, x, out_TH.data_ptr()
        )
        return out_TH


def _stream(
    outputs: Outputs, x_TH: Tensor, added_TH: Tensor | None, hidden: int
) -> tuple[Tensor, tuple[int, int, int]]:
    """(x + added, which is still to be computed; the addresses of x, added and that)."""
    _, x = rows_of(x_TH, hidden)
    if added_TH is None:
        return x_TH, (x, 0, 0)
    require_same("x", x_TH, "added", added_TH)
    total_TH = outputs.empty(x_TH.shape)
    return total_TH, (x, added_TH.data_ptr(), total_TH.data_ptr())
