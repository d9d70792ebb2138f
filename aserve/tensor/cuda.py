"""`Ops` on a GPU: shape checks, then one call of the CUDA library each; `ReferenceOps` is the twin.

Tensors are on the device; calls are queued on torch's current stream and wait for nothing. Indices
on the device cannot be looked at without waiting: slots outside the pages are left out, ids outside
the table give NaN, where the twin raises. Linears are bfloat16, KV bfloat16 or int8. There is no
fallback.
"""

import ctypes
import dataclasses
import pathlib
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.tensor import cuda_library as abi
from aserve.tensor.addresses import (
    indices,
    matrix,
    norm_weight,
    require_same,
    row_bytes,
    row_stride,
)
from aserve.tensor.cuda_pages import TYPE_CODES, copy_of, pages_of, require_aligned, tokens_of
from aserve.tensor.ops import Attend, CpKind, KvCopy, KvLayer
from aserve.tensor.ops import Linear as LinearProtocol
from aserve.tensor.rope import RopeTable

# What a call may take for sums of splits; beyond it each tile goes over all its splits itself.
PARTIALS_BYTES_MAX = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True)
class CudaLinear:
    """bfloat16 [n up to a multiple of 4, row_blocks, k of a block up to a multiple of 8], zeros
    behind; bias float32."""

    weight: Tensor
    bias_N: Tensor | None
    n: int
    k: int
    row_blocks: int
    dtype: torch.dtype = torch.bfloat16
    format: str = "bf16"

    @property
    def k_pad(self) -> int:
        return self.weight.shape[2]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias_N is None else self.bias_N.nbytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:  # what narrows or widens what rows see, beyond `Attend`; see aserve_attend
    window: int = 0  # keys, the row's own included; 0: all
    sinks_H: Tensor | None = None  # float32
    path_start_M: Tensor | None = None  # int32, rows + 1
    paths: Tensor | None = None  # int32


ALL_KEYS = Sight()


class CudaOps:
    """`Ops` on one device. With the library built for the host, tests have it on the CPU."""

    def __init__(self, library: abi.Library, device: torch.device) -> None:
        self.library = library
        self.device = device

    def _stream(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).cuda_stream

    def call(self, name: str, *arguments: object) -> None:
        self.library.call(name, *arguments, stream=self._stream())

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def check_here(self, *tensors: Tensor) -> None:
        for x in tensors:
            if x.device != self.device:
                raise ValueError(f"a tensor is on {x.device}, the kernels on {self.device}")

    def pack(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, row_blocks: int = 1
    ) -> CudaLinear:
        if weight_NK.dtype is not torch.bfloat16 or weight_NK.dim() != 2:
            raise ValueError(f"a CUDA weight is a bfloat16 matrix, not {weight_NK.dtype}")
        n, k = weight_NK.shape
        if row_blocks < 1 or k % row_blocks:
            raise ValueError(f"K = {k} does not split into {row_blocks} equal blocks")
        if bias_N is not None and bias_N.shape != (n,):
            raise ValueError(f"bias has shape {tuple(bias_N.shape)}, the weight has {n} rows")
        step = k // row_blocks
        weight = torch.zeros(
            (_up(n, 4), row_blocks, _up(step, 8)), dtype=torch.bfloat16, device=self.device
        )
        weight[:n, :, :step] = weight_NK.view(n, row_blocks, step).to(self.device)
        bias = None if bias_N is None else bias_N.to(self.device, torch.float32).contiguous()
        return CudaLinear(weight, bias, n, k, row_blocks)

    def linear(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, CudaLinear)
        parts = self._parts(x_TK, weight)
        if weight.row_blocks == 1 and weight.bias_N is None and parts.shape[2] == weight.n:
            return parts[0]
        return self._sum(parts, weight)

    def linear_parts(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, CudaLinear)
        return self._parts(x_TK, weight)[..., : weight.n].contiguous()

    def _parts(self, x_TK: Tensor, weight: CudaLinear) -> Tensor:
        """[row_blocks, T, padded n]."""
        rows, k = matrix("x", x_TK)
        self.check_here(x_TK)
        if k != weight.k:
            raise ValueError(f"x has {k} columns, the weight {weight.k}")
        n_pad, blocks, k_pad = weight.weight.shape
        x = self.empty((rows, blocks, k_pad), torch.bfloat16)
        self.call(
            "narrow",
            abi.Narrow(x_TK.data_ptr(), x.data_ptr(), k, rows, k, k_pad, blocks),
        )
        parts = self.empty((blocks, rows, n_pad))
        call = abi.Gemm(
            x=x.data_ptr(), w=weight.weight.data_ptr(), parts=parts.data_ptr(),
            m=rows, n=n_pad, k=k_pad, blocks=blocks,
        )  # fmt: skip
        call.workspace_bytes = self.library.gemm_workspace(call) if rows else 0
        workspace = self.empty((call.workspace_bytes,), torch.uint8)
        call.workspace = workspace.data_ptr()
        self.call("gemm", call)
        return parts

    def _sum(self, parts: Tensor, weight: CudaLinear) -> Tensor:
        blocks, rows, n_pad = parts.shape
        y = self.empty((rows, weight.n))
        call = abi.Sum(
            parts=parts.data_ptr(), bias=_address(weight.bias_N), y=y.data_ptr(),
            m=rows, n=weight.n, n_pad=n_pad, blocks=blocks,
        )  # fmt: skip
        self.call("sum_parts", call)
        return y

    def embed(self, table_VH: Tensor | LinearProtocol, ids_T: Tensor) -> Tensor:
        if isinstance(table_VH, CudaLinear):
            if table_VH.row_blocks != 1 or table_VH.k_pad != table_VH.k:
                raise ValueError("a table is one row block, its rows a multiple of 8 long")
            table = table_VH.weight[: table_VH.n, 0]
        else:
            assert isinstance(table_VH, Tensor)
            table = table_VH
        if table.dtype not in (torch.float32, torch.bfloat16) or not table.is_contiguous():
            raise ValueError(f"a table is contiguous float32 or bfloat16, not {table.dtype}")
        ids = ids_T.long().contiguous()
        self.check_here(table, ids)
        vocab, dim = table.shape
        out = self.empty((len(ids), dim))
        self.call(
            "embed",
            abi.Embed(
                table.data_ptr(), ids.data_ptr(), out.data_ptr(), vocab, dim, len(ids),
                TYPE_CODES[table.dtype],
            ),
        )  # fmt: skip
        return out

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        self.check_here(x_TH, weight_H)
        x_THD = x_TH[:, None, :] if x_TH.dim() == 2 else x_TH
        rows, heads, dim = x_THD.shape
        out = self.empty(x_TH.shape)
        call = abi.Norm(
            x=x_TH.data_ptr(), x_stride=row_stride("x", x_THD), y=out.data_ptr(),
            weight=norm_weight(weight_H, dim), rows=rows, heads=heads, dim=dim, eps=eps,
        )  # fmt: skip
        self.call("rms_norm", call)
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        require_same("x", x, "y", y)
        self.check_here(x, y)
        out = self.empty(x.shape)
        self.call("add", x.data_ptr(), y.data_ptr(), out.data_ptr(), x.numel())
        return out

    def add_rms_norm(
        self, residual_TH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        require_same("residual", residual_TH, "x", x_TH)
        self.check_here(residual_TH, x_TH, weight_H)
        rows, dim = matrix("x", x_TH)
        total, normed = self.empty((rows, dim)), self.empty((rows, dim))
        call = abi.Norm(
            x=x_TH.data_ptr(), x_stride=dim, residual=residual_TH.data_ptr(),
            total=total.data_ptr(), weight=norm_weight(weight_H, dim), y=normed.data_ptr(),
            rows=rows, heads=1, dim=dim, eps=eps,
        )  # fmt: skip
        self.call("rms_norm", call)
        return total, normed

    def rope(self, q_THD: Tensor, k_TGD: Tensor, positions_T: Tensor, cos_sin: RopeTable) -> None:
        rows, heads, dim = q_THD.shape
        if k_TGD.shape[::2] != (rows, dim):
            raise ValueError(f"q is {tuple(q_THD.shape)} but k {tuple(k_TGD.shape)}")
        table = cos_sin.cos_sin_PR
        if table.dtype is not torch.float32 or not table.is_contiguous():
            raise ValueError("a rope table is float32 and contiguous")
        self.check_here(q_THD, k_TGD, positions_T, table)
        call = abi.Rope(
            q=q_THD.data_ptr(), q_stride=row_stride("q", q_THD), q_heads=heads,
            k=k_TGD.data_ptr(), k_stride=row_stride("k", k_TGD), k_heads=k_TGD.shape[1],
            rows=rows, dim=dim, rot=table.shape[1],
            positions=indices("positions", positions_T, rows), cos_sin=table.data_ptr(),
        )  # fmt: skip
        self.call("rope", call)

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        rows, both = matrix("gate_up", gate_up_TF2)
        self.check_here(gate_up_TF2)
        if both % 2:
            raise ValueError(f"gate_up has {both} columns, an odd number")
        out = self.empty((rows, both // 2))
        call = abi.SiluMul(gate_up_TF2.data_ptr(), out.data_ptr(), None, rows, both // 2)
        self.call("silu_mul", call)
        return out

    def kv_append(self, k_TGD: Tensor, v_TGD: Tensor, kv: KvLayer, slots_T: Tensor) -> None:
        rows = k_TGD.shape[0]
        pages = self._pages(kv)
        for x_TGD in (k_TGD, v_TGD):
            if x_TGD.shape != (rows, pages.heads, pages.dim):
                raise ValueError(
                    f"rows of {tuple(x_TGD.shape)} do not fit pages of {tuple(kv.k_PSHD.shape)}"
                )
        self.check_here(k_TGD, v_TGD, slots_T)
        call = abi.Append(
            k_TGD.data_ptr(), v_TGD.data_ptr(), row_stride("k", k_TGD), row_stride("v", v_TGD),
            indices("slots", slots_T, rows), rows,
        )  # fmt: skip
        self.call("kv_append", pages, call)

    def _pages(self, kv: KvLayer) -> ctypes.Structure:
        self.check_here(kv.k_PSHD, kv.v_PSHD)
        return pages_of(kv)

    def _tokens(self, pool: Tensor, slots_T: Tensor, rows: Tensor) -> ctypes.Structure:
        self.check_here(pool, slots_T)
        return tokens_of(pool, slots_T, rows)

    def kv_gather(self, kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        out = []
        for pool in (kv.k_PSHD, kv.v_PSHD):
            rows = self.empty((len(slots_T), *pool.shape[2:]), pool.dtype)
            self.call("kv_gather", self._tokens(pool, slots_T, rows))
            out.append(rows)
        return out[0], out[1]

    def kv_move(self, kv: KvLayer, slots_from: Tensor, slots_to: Tensor) -> None:
        if slots_from.shape != slots_to.shape:
            raise ValueError(f"{len(slots_from)} sources, {len(slots_to)} destinations")
        for pool, rows in zip((kv.k_PSHD, kv.v_PSHD), self.kv_gather(kv, slots_from), strict=True):
            self.call("kv_scatter", self._tokens(pool, slots_to, rows))

    def kv_copy(self, source: KvLayer, to: KvLayer, copy: KvCopy) -> None:
        self.check_here(copy.pages_from, copy.pages_to)
        for x, y in ((source.k_PSHD, to.k_PSHD), (source.v_PSHD, to.v_PSHD)):
            self.check_here(x, y)
            self.call("kv_copy", copy_of(x, y, copy))

    def attention(
        self, q_THD: Tensor, kv: KvLayer, attend: Attend, scale: float, window: int = 0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        paths = () if attend.tree is None else (attend.tree.path_start_T1, attend.tree.paths)
        return self.attention_with(q_THD, kv, attend, scale, Sight(window, sinks_H, *paths))

    def attention_with(
        self, q_THD: Tensor, kv: KvLayer, attend: Attend, scale: float, sight: Sight
    ) -> Tensor:
        rows, heads, dim = q_THD.shape
        pages = self._pages(kv)
        if pages.type == 0 or pages.dim != dim or heads % pages.heads:
            raise ValueError(
                f"q of {tuple(q_THD.shape)}, pages of {tuple(kv.k_PSHD.shape)} {kv.k_PSHD.dtype}"
            )
        if dim % 8 or dim > 128:
            raise ValueError(f"head_dim {dim}: CUDA attention takes multiples of 8 up to 128")
        require_aligned(pages)
        table = attend.page_table_NP
        sequences, pages_max = table.shape
        if table.dtype is not torch.int32 or not table.is_contiguous():
            raise ValueError("a page table is int32 and contiguous")
        self.check_here(q_THD, table)
        out = self.empty((rows, heads, dim))
        splits = max(1, -(-pages_max * pages.page_size // abi.FLASH_SPLIT))
        partials = self._partials(q_THD, sequences, splits)
        call = abi.Attention(
            q=q_THD.data_ptr(), q_stride=row_stride("q", q_THD), out=out.data_ptr(),
            rows=rows, heads=heads, sequences=sequences, pages_max=pages_max, splits=splits,
            row_start=indices("row_start", attend.row_start_M, sequences + 1),
            positions=indices("positions", attend.positions_T, rows),
            kv_len=indices("kv_len", attend.kv_len_N, sequences), page_table=table.data_ptr(),
            sinks=None if sight.sinks_H is None else norm_weight(sight.sinks_H, heads),
            path_start=(
                None if sight.path_start_M is None
                else indices("path_start", sight.path_start_M, rows + 1)
            ),
            paths=_address(sight.paths), partials=_address(partials), window=sight.window,
            scale=scale,
        )  # fmt: skip
        self.call("attention", pages, call)
        return out

    def _partials(self, q_THD: Tensor, sequences: int, splits: int) -> Tensor | None:
        """Room for sums of splits where there are few rows to a sequence. No bit depends on it."""
        rows, heads, dim = q_THD.shape
        n_floats = rows * heads * splits * (dim + 2)
        if rows > 8 * sequences or 4 * n_floats > PARTIALS_BYTES_MAX:
            return None
        return self.empty((n_floats,))

    def cp_counts(self, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        rows = [self._cp_plan(kind, cp, rank, lengths)[1] for rank in range(cp)]
        return torch.stack([places.diff() for places in rows]).int()

    def cp_index(self, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]) -> Tensor:
        starts, places = self._cp_plan(kind, cp, rank, lengths)
        out = self.empty((int(places[-1]),), torch.int32)
        given = [x.to(self.device) for x in (starts, torch.tensor(lengths).long(), places)]
        call = abi.CpIndex(
            *(x.data_ptr() for x in given), out.data_ptr(), len(lengths), cp, rank,
            int(kind == "zigzag"),
        )  # fmt: skip
        self.call("cp_index", call)
        return out

    def _cp_plan(
        self, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """On the CPU: where sequences start in the group, and in a rank's rows with their end."""
        if kind not in ("interleave", "zigzag") or cp < 1 or not 0 <= rank < cp:
            raise ValueError(f"rank {rank} of {cp} of a {kind!r} split")
        if min(lengths, default=0) < 0:
            raise ValueError("a length is negative")
        ends = torch.tensor([0, *lengths]).long().cumsum(0)
        if kind == "interleave":
            return ends[:-1], (ends + cp - 1 - rank) // cp
        length = ends.diff()
        least, longer = length // (2 * cp), length % (2 * cp)
        counts = 2 * least + (rank < longer).long() + (2 * cp - 1 - rank < longer).long()
        return ends[:-1], torch.cat([ends[:1], counts.cumsum(0)])

    def cp_split(
        self, x: Tensor, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]
    ) -> Tensor:
        return self._by_index("gather_rows", x, lengths, self.cp_index(kind, cp, rank, lengths))

    def cp_join(self, x: Tensor, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        ranks = [self.cp_index(kind, cp, rank, lengths) for rank in range(cp)]
        return self._by_index("scatter_rows", x, lengths, torch.cat(ranks))

    def _by_index(self, name: str, x: Tensor, lengths: Sequence[int], index_T: Tensor) -> Tensor:
        self.check_here(x)
        if len(x) != sum(lengths):
            raise ValueError(f"x has {len(x)} rows, the group {sum(lengths)}")
        out = self.empty((len(index_T), *x.shape[1:]), x.dtype)
        address, _, stride, row_len = row_bytes(x)
        n_rows = len(index_T)
        self.call(
            name, abi.Rows(address, out.data_ptr(), index_T.data_ptr(), stride, row_len, n_rows)
        )
        return out


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def open_cuda(path: pathlib.Path = abi.PATH) -> CudaOps:
    """On the current device; ConfigError says what is missing: library, device, torch's CUDA."""
    library = abi.open_library(path)
    if library.is_host:
        return CudaOps(library, torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ConfigError("there is a CUDA device, but this torch is built without CUDA")
    return CudaOps(library, torch.device("cuda", torch.cuda.current_device()))
