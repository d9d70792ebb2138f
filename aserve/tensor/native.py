"""`Ops` by the kernels in csrc: thin wrappers that check tensors and hand over addresses.

Bits of a row depend on nothing but that row and its own sequence: not on the other rows, the
number of threads, the chunking or the pages. They may differ from one processor level to another.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve import _native
from aserve.tensor.addresses import (
    indices,
    kv_type,
    matrix,
    norm_weight,
    pages,
    require_same,
    row_bytes,
    row_stride,
    tree_paths,
    weight_dtype,
)
from aserve.tensor.native_blocks import NativeBlocks
from aserve.tensor.ops import (
    BLOCK_FORMATS,
    Attend,
    BlockKind,
    CpKind,
    KvCopy,
    KvLayer,
    WeightFormat,
)
from aserve.tensor.ops import Linear as LinearProtocol
from aserve.tensor.outputs import Outputs
from aserve.tensor.rope import RopeTable

_F32, _BF16, _I32, _I64 = torch.float32, torch.bfloat16, torch.int32, torch.int64


@dataclasses.dataclass(frozen=True, slots=True)
class NativeLinear:
    """A weight in the layout of csrc/include/aserve/linear.h."""

    packed: _native.Packed
    n: int
    k: int
    format: WeightFormat
    dtype: torch.dtype
    row_blocks: int
    nbytes: int


class NativeOps:
    """`Ops` on `threads` threads, the caller's included. Calls from several threads take turns."""

    def __init__(self, threads: int, fused: bool = True) -> None:
        self.team = _native.Team(threads)
        self.outputs = Outputs()
        self.blocks = NativeBlocks(self.team, self.outputs) if fused else None

    @property
    def level(self) -> str:
        """The instruction set in use: generic, avx2, avx512 or amx."""
        return _native.level()

    def pack(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, row_blocks: int = 1
    ) -> NativeLinear:
        dtype = weight_dtype("weight", weight_NK)
        if weight_NK.dim() != 2:
            raise ValueError(f"a weight has 2 dimensions, not {weight_NK.dim()}")
        weight_NK = weight_NK.contiguous()
        n, k = weight_NK.shape
        bias_N, bias = _bias(bias_N, n)
        packed = _native.pack(
            self.team, dtype is _BF16, weight_NK.data_ptr(), n, k, bias, row_blocks
        )
        name: WeightFormat = "bf16" if dtype is _BF16 else "f32"
        return NativeLinear(packed, n, k, name, dtype, row_blocks, packed.nbytes)

    def pack_blocks(
        self,
        blocks_NB: Tensor,
        kind: BlockKind,
        k: int,
        bias_N: Tensor | None = None,
        row_blocks: int = 1,
    ) -> NativeLinear:
        if blocks_NB.dtype is not torch.uint8 or blocks_NB.dim() != 2:
            raise ValueError(
                f"blocks are {blocks_NB.dtype} {tuple(blocks_NB.shape)}: want uint8 rows"
            )
        blocks_NB = blocks_NB.contiguous()
        n, row_bytes = blocks_NB.shape
        bias_N, bias = _bias(bias_N, n)
        address = blocks_NB.data_ptr()
        packed = _native.pack_blocks(self.team, kind, address, row_bytes, n, k, bias, row_blocks)
        return NativeLinear(packed, n, k, BLOCK_FORMATS[kind], _BF16, row_blocks, packed.nbytes)

    def linear(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, NativeLinear)
        m, k = matrix("x", x_TK)
        out = self.outputs.empty((m, weight.n))
        _native.linear(self.team, weight.packed, x_TK.data_ptr(), m, k, out.data_ptr())
        return out

    def linear_parts(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, NativeLinear)
        m, k = matrix("x", x_TK)
        out = self.outputs.empty((weight.row_blocks, m, weight.n))
        _native.linear_parts(self.team, weight.packed, x_TK.data_ptr(), m, k, out.data_ptr())
        return out

    def embed(self, table_VH: Tensor | LinearProtocol, ids_T: Tensor) -> Tensor:
        if ids_T.dtype is not _I64 or not ids_T.is_contiguous():
            ids_T = ids_T.to(_I64).contiguous()
        rows = ids_T.numel()
        if isinstance(table_VH, NativeLinear):
            out = self.outputs.empty((rows, table_VH.k))
            _native.embed_packed(self.team, table_VH.packed, ids_T.data_ptr(), rows, out.data_ptr())
            return out
        assert isinstance(table_VH, Tensor)
        dtype = weight_dtype("table", table_VH)
        if table_VH.dim() != 2 or not table_VH.is_contiguous():
            raise ValueError("an embedding table is a contiguous [vocab, hidden]")
        vocab, dim = table_VH.shape
        out = self.outputs.empty((rows, dim))
        _native.embed(
            dtype is _BF16, table_VH.data_ptr(), vocab, dim, ids_T.data_ptr(), rows, out.data_ptr()
        )
        return out

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if x_TH.dim() == 2:
            rows, dim = x_TH.shape
            heads = 1
            stride = row_stride("x", x_TH[:, None, :])
        else:
            rows, heads, dim = x_TH.shape
            stride = row_stride("x", x_TH)
        weight = norm_weight(weight_H, dim)
        out = self.outputs.empty(x_TH.shape)
        _native.rms_norm(
            self.team, x_TH.data_ptr(), stride, weight, out.data_ptr(), rows, heads, dim, eps
        )
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        require_same("x", x, "y", y)
        out = self.outputs.empty(x.shape)
        _native.add(self.team, x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel())
        return out

    def add_rms_norm(
        self, residual_TH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        require_same("residual", residual_TH, "x", x_TH)
        rows, dim = matrix("x", x_TH)
        weight = norm_weight(weight_H, dim)
        total, normed = self.outputs.empty((rows, dim)), self.outputs.empty((rows, dim))
        _native.add_rms_norm(
            self.team,
            residual_TH.data_ptr(),
            x_TH.data_ptr(),
            weight,
            total.data_ptr(),
            normed.data_ptr(),
            rows,
            dim,
            eps,
        )
        return total, normed

    def rope(self, q_THD: Tensor, k_TGD: Tensor, positions_T: Tensor, cos_sin: RopeTable) -> None:
        rows, heads, dim = q_THD.shape
        k_rows, k_heads, k_dim = k_TGD.shape
        if k_rows != rows or k_dim != dim:
            raise ValueError(f"q is {tuple(q_THD.shape)} but k {tuple(k_TGD.shape)}")
        table = cos_sin.cos_sin_PR
        positions_max, rot = table.shape
        if table.dtype is not _F32 or not table.is_contiguous():
            raise ValueError("a rope table is float32 and contiguous")
        _native.rope(
            self.team,
            q_THD.data_ptr(),
            row_stride("q", q_THD),
            heads,
            k_TGD.data_ptr(),
            row_stride("k", k_TGD),
            k_heads,
            rows,
            dim,
            indices("positions", positions_T, rows),
            table.data_ptr(),
            positions_max,
            rot,
        )

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        rows, both = matrix("gate_up", gate_up_TF2)
        if both % 2:
            raise ValueError(f"gate_up has {both} columns, an odd number")
        out = self.outputs.empty((rows, both // 2))
        _native.silu_mul(self.team, gate_up_TF2.data_ptr(), out.data_ptr(), rows, both // 2)
        return out

    def kv_append(self, k_TGD: Tensor, v_TGD: Tensor, kv: KvLayer, slots_T: Tensor) -> None:
        rows = k_TGD.shape[0]
        places = []
        for x_TGD, pool in ((k_TGD, kv.k_PSHD), (v_TGD, kv.v_PSHD)):
            shape = pages(pool)
            if pool.dtype is not kv.k_PSHD.dtype or x_TGD.shape != (rows, shape[2], kv.head_dim):
                raise ValueError(
                    f"rows of {tuple(x_TGD.shape)} do not fit pages of {shape[:4]} {pool.dtype}"
                )
            places.append((x_TGD.data_ptr(), row_stride("k or v", x_TGD), pool.data_ptr(), shape))
        slots = indices("slots", slots_T, rows)
        _native.kv_append(self.team, kv_type(kv.k_PSHD), *places, slots, rows)

    def kv_gather(self, kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        rows = slots_T.shape[0]
        slots = indices("slots", slots_T, rows)
        out = []
        for pool in (kv.k_PSHD, kv.v_PSHD):
            shape = pages(pool)
            gathered = self.outputs.empty((rows, shape[2], shape[3]), pool.dtype)
            to = gathered.data_ptr()
            _native.kv_gather(self.team, kv_type(pool), pool.data_ptr(), shape, slots, rows, to)
            out.append(gathered)
        return out[0], out[1]

    def kv_move(self, kv: KvLayer, slots_from: Tensor, slots_to: Tensor) -> None:
        rows = slots_from.shape[0]
        start = indices("slots_from", slots_from, rows)
        end = indices("slots_to", slots_to, rows)
        for pool in (kv.k_PSHD, kv.v_PSHD):
            shape = pages(pool)
            _native.kv_move(self.team, kv_type(pool), pool.data_ptr(), shape, start, end, rows)

    def kv_copy(self, source: KvLayer, to: KvLayer, copy: KvCopy) -> None:
        tables = [
            (indices("a page table", table, table.numel()), table.numel(), head)
            for table, head in (
                (copy.pages_from, copy.head_from),
                (copy.pages_to, copy.head_to),
            )
        ]
        heads = source.k_PSHD.shape[2] if copy.heads is None else copy.heads
        for x, y in ((source.k_PSHD, to.k_PSHD), (source.v_PSHD, to.v_PSHD)):
            if x.dtype is not y.dtype:
                raise ValueError(f"pages of {x.dtype} cannot be copied to pages of {y.dtype}")
            _native.kv_copy(
                self.team,
                kv_type(x),
                (x.data_ptr(), pages(x), *tables[0]),
                (y.data_ptr(), pages(y), *tables[1]),
                (heads, copy.begin, copy.end),
            )

    def attention(
        self,
        q_THD: Tensor,
        kv: KvLayer,
        attend: Attend,
        scale: float,
        window: int = 0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        rows, heads, dim = q_THD.shape
        k, v = kv.k_PSHD, kv.v_PSHD
        if k.dtype is not v.dtype or kv.head_dim != dim:
            raise ValueError(f"q of {tuple(q_THD.shape)}, pages of {tuple(k.shape)} {k.dtype}")
        table = attend.page_table_NP
        sequences, pages_max = table.shape
        if table.dtype is not _I32 or not table.is_contiguous():
            raise ValueError("a page table is int32 and contiguous")
        out = self.outputs.empty((rows, heads, dim))
        _native.attention(
            self.team,
            (q_THD.data_ptr(), row_stride("q", q_THD), heads),
            rows,
            (kv_type(k), k.data_ptr(), v.data_ptr(), pages(k), pages(v)),
            (
                sequences,
                indices("row_start", attend.row_start_M, sequences + 1),
                indices("positions", attend.positions_T, rows),
                indices("kv_len", attend.kv_len_N, sequences),
                table.data_ptr(),
                pages_max,
                *tree_paths(attend.tree, rows),
            ),
            (scale, window, 0 if sinks_H is None else norm_weight(sinks_H, heads)),
            out.data_ptr(),
        )
        return out

    def cp_counts(self, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        lengths = tuple(lengths)
        is_zigzag = _is_zigzag(kind, cp)
        out = self.outputs.empty((cp, len(lengths)), _I32)
        _native.cp_counts(is_zigzag, cp, lengths, out.data_ptr())
        return out

    def cp_index(self, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]) -> Tensor:
        share = _is_zigzag(kind, cp), cp, rank, tuple(lengths)
        out = self.outputs.empty((_native.cp_rows(*share),), _I32)
        _native.cp_index(*share, out.data_ptr())
        return out

    def cp_split(
        self, x: Tensor, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]
    ) -> Tensor:
        share = _is_zigzag(kind, cp), cp, rank, tuple(lengths)
        out = self.outputs.empty((_native.cp_rows(*share), *x.shape[1:]), x.dtype)
        _native.cp_split(self.team, row_bytes(x), share, out.data_ptr())
        return out

    def cp_join(self, x: Tensor, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        share = _is_zigzag(kind, cp), cp, tuple(lengths)
        out = self.outputs.empty(x.shape, x.dtype)
        _native.cp_join(self.team, row_bytes(x), share, out.data_ptr())
        return out


def _is_zigzag(kind: str, cp: int) -> bool:
    if kind not in ("interleave", "zigzag"):
        raise ValueError(f"a context-parallel split is 'interleave' or 'zigzag', not {kind!r}")
    if cp < 1:
        raise ValueError(f"cp is {cp}: at least 1")
    return kind == "zigzag"


def _bias(bias_N: Tensor | None, n: int) -> tuple[Tensor | None, int]:
    """The bias as float32, to be held while its address is used, and that address: 0 if none."""
    if bias_N is None:
        return None, 0
    if bias_N.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}, the weight has {n} rows")
    bias_N = bias_N.to(_F32).contiguous()
    return bias_N, bias_N.data_ptr()
