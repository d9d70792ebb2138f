"""The plain torch twin of every native operation: slow, short, any float dtype.

It defines what the native kernels must compute. It makes no promise about bits.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.tensor.collective import sum_blocks
from aserve.tensor.ops import (
    BLOCK_FORMATS,
    SCALE_BYTES,
    Attend,
    BlockKind,
    CpKind,
    KvCopy,
    KvLayer,
    WeightFormat,
)
from aserve.tensor.ops import Linear as LinearProtocol
from aserve.tensor.rope import RopeTable


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """The weight as it came; a bfloat16 or quantised one is kept widened, with `dtype` what
    activations are rounded to."""

    weight_NK: Tensor
    bias_N: Tensor | None
    format: WeightFormat
    dtype: torch.dtype
    row_blocks: int

    @property
    def n(self) -> int:
        return self.weight_NK.shape[0]

    @property
    def k(self) -> int:
        return self.weight_NK.shape[1]

    @property
    def nbytes(self) -> int:
        bias_bytes = 0 if self.bias_N is None else self.bias_N.nbytes
        return self.weight_NK.nbytes + bias_bytes


class ReferenceOps:
    """`Ops` in plain torch."""

    def pack(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, row_blocks: int = 1
    ) -> ReferenceLinear:
        if weight_NK.dim() != 2:
            raise ValueError(f"a weight has 2 dimensions, not {weight_NK.dim()}")
        n, k = weight_NK.shape
        _check_packing(n, k, bias_N, row_blocks)
        wide = torch.float32 if weight_NK.dtype == torch.bfloat16 else weight_NK.dtype
        bias = None if bias_N is None else bias_N.to(wide)
        name: WeightFormat = "bf16" if weight_NK.dtype == torch.bfloat16 else "f32"
        return ReferenceLinear(weight_NK.to(wide), bias, name, weight_NK.dtype, row_blocks)

    def pack_blocks(
        self,
        blocks_NB: Tensor,
        kind: BlockKind,
        k: int,
        bias_N: Tensor | None = None,
        row_blocks: int = 1,
    ) -> ReferenceLinear:
        n = len(blocks_NB)
        _check_packing(n, k, bias_N, row_blocks)
        if k // row_blocks % 32:
            raise ValueError(f"a row block of {k // row_blocks} columns is not a multiple of 32")
        bias = None if bias_N is None else bias_N.float()
        weight_NK = _dequantise(blocks_NB, kind, k)
        return ReferenceLinear(weight_NK, bias, BLOCK_FORMATS[kind], torch.bfloat16, row_blocks)

    def linear(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        out = sum_blocks(self.linear_parts(x_TK, weight))
        return out if weight.bias_N is None else out + weight.bias_N.to(out.dtype)

    def linear_parts(self, x_TK: Tensor, weight: LinearProtocol) -> Tensor:
        assert isinstance(weight, ReferenceLinear)
        if x_TK.shape[1] != weight.k:
            raise ValueError(f"x has {x_TK.shape[1]} columns, the weight {weight.k}")
        dtype = x_TK.dtype
        if weight.dtype == torch.bfloat16:
            x_TK = x_TK.bfloat16()
        x_TK = x_TK.to(weight.weight_NK.dtype)
        step = weight.k // weight.row_blocks
        parts = x_TK.new_empty(weight.row_blocks, len(x_TK), weight.n)
        for part, start in zip(parts, range(0, weight.k, step), strict=True):
            columns = slice(start, start + step)
            torch.matmul(x_TK[:, columns], weight.weight_NK[:, columns].T, out=part)
        return parts.to(dtype)

    def embed(self, table_VH: Tensor | LinearProtocol, ids_T: Tensor) -> Tensor:
        if isinstance(table_VH, ReferenceLinear):
            narrow = table_VH.format not in ("f32", "bf16")
            table_VH = table_VH.weight_NK.float() if narrow else table_VH.weight_NK
        assert isinstance(table_VH, Tensor)
        if ids_T.numel() and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < len(table_VH):
            raise ValueError(f"a token id is outside [0, {len(table_VH)})")
        rows = table_VH[ids_T.long()]
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        mean = x_TH.square().mean(-1, keepdim=True)
        return x_TH * torch.rsqrt(mean + eps) * weight_H.to(x_TH.dtype)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape != y.shape:
            raise ValueError(f"cannot add shapes {tuple(x.shape)} and {tuple(y.shape)}")
        return x + y

    def add_rms_norm(
        self, residual_TH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = self.add(residual_TH, x_TH)
        return total, self.rms_norm(total, weight_H, eps)

    def rope(self, q_THD: Tensor, k_TGD: Tensor, positions_T: Tensor, cos_sin: RopeTable) -> None:
        half = cos_sin.rot // 2
        rows = cos_sin.cos_sin_PR[positions_T.long()].to(q_THD.dtype)[:, None, :]
        cos, sin = rows[..., :half], rows[..., half:]
        for x in (q_THD, k_TGD):
            a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
            x[..., :half] = a * cos - b * sin
            x[..., half : 2 * half] = b * cos + a * sin

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        gate, up = gate_up_TF2.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def kv_append(self, k_TGD: Tensor, v_TGD: Tensor, kv: KvLayer, slots_T: Tensor) -> None:
        place = _places(kv, slots_T)
        for x_TGD, pool in ((k_TGD, kv.k_PSHD), (v_TGD, kv.v_PSHD)):
            pool[place] = _quantised(x_TGD) if pool.dtype == torch.int8 else x_TGD.to(pool.dtype)

    def kv_gather(self, kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        place = _places(kv, slots_T)
        return kv.k_PSHD[place], kv.v_PSHD[place]

    def kv_move(self, kv: KvLayer, slots_from: Tensor, slots_to: Tensor) -> None:
        if slots_from.shape != slots_to.shape:
            raise ValueError(f"{len(slots_from)} sources, {len(slots_to)} destinations")
        k, v = self.kv_gather(kv, slots_from)
        place = _places(kv, slots_to)
        kv.k_PSHD[place] = k
        kv.v_PSHD[place] = v

    def kv_copy(self, source: KvLayer, to: KvLayer, copy: KvCopy) -> None:
        heads = source.k_PSHD.shape[2] if copy.heads is None else copy.heads
        place = torch.arange(copy.begin, copy.end)
        for x, y in ((source.k_PSHD, to.k_PSHD), (source.v_PSHD, to.v_PSHD)):
            copy.check(x, y, heads)
            rows = x[_pages_of(x, copy.pages_from, place)]
            part = rows[:, copy.head_from : copy.head_from + heads]
            page_T, offset_T = _pages_of(y, copy.pages_to, place)
            y[page_T, offset_T, copy.head_to : copy.head_to + heads] = part

    def attention(
        self,
        q_THD: Tensor,
        kv: KvLayer,
        attend: Attend,
        scale: float,
        window: int = 0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(q_THD)
        row_start = attend.row_start_M.tolist()
        for n, pages_P in enumerate(attend.page_table_NP):
            for rows, place_L in _keys_of(attend, range(row_start[n], row_start[n + 1])):
                position_R = attend.positions_T[rows].long()
                at = _pages_of(kv.k_PSHD, pages_P, place_L)
                k, v = (_widened(pool[at], q_THD.dtype) for pool in (kv.k_PSHD, kv.v_PSHD))
                q_RHD = q_THD[rows]
                if kv.k_PSHD.dtype in (torch.bfloat16, torch.int8):
                    q_RHD = q_RHD.bfloat16().to(q_RHD.dtype)  # as the native kernel does
                behind_RL = position_R[:, None] - torch.arange(len(place_L))[None, :]
                hidden_RL = behind_RL < 0
                if window:
                    hidden_RL |= behind_RL >= window
                out[rows] = _attend_one(q_RHD * scale, k, v, hidden_RL, sinks_H)
        return out

    def cp_counts(self, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        _check_group(kind, cp, lengths)
        owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths).long())
        ranks = [self.cp_index(kind, cp, rank, lengths).long() for rank in range(cp)]
        return torch.stack([owner[rows].bincount(minlength=len(lengths)).int() for rows in ranks])

    def cp_index(self, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]) -> Tensor:
        _check_group(kind, cp, lengths)
        if not 0 <= rank < cp:
            raise ValueError(f"rank is {rank}, outside [0, cp)")
        rows = torch.arange(sum(lengths), dtype=torch.int32)
        if kind == "interleave":
            return rows[rank::cp]
        blocks = [one.tensor_split(2 * cp) for one in rows.split(list(lengths))]
        return torch.cat([rows[:0], *(part for b in blocks for part in (b[rank], b[-1 - rank]))])

    def cp_split(
        self, x: Tensor, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]
    ) -> Tensor:
        if len(x) != sum(lengths):
            raise ValueError(f"x has {len(x)} rows, the group {sum(lengths)}")
        return x[self.cp_index(kind, cp, rank, lengths).long()]

    def cp_join(self, x: Tensor, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        if len(x) != sum(lengths):
            raise ValueError(f"x has {len(x)} rows, the group {sum(lengths)}")
        order = torch.cat([self.cp_index(kind, cp, rank, lengths) for rank in range(cp)])
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        out[order.long()] = x
        return out


def _check_packing(n: int, k: int, bias_N: Tensor | None, row_blocks: int) -> None:
    if row_blocks < 1 or k % row_blocks:
        raise ValueError(f"K = {k} does not split into {row_blocks} equal blocks")
    if bias_N is not None and bias_N.shape != (n,):
        raise ValueError(f"bias has shape {tuple(bias_N.shape)}, the weight has {n} rows")


def _dequantise(blocks_NB: Tensor, kind: BlockKind, k: int) -> Tensor:
    """[n, k] in float64, where each product and sum is exact; as in `Ops.pack_blocks`."""
    heads = 2 if kind == "Q4_1" else 1
    block_bytes = 2 * heads + (32 if kind == "Q8_0" else 16)
    if blocks_NB.dtype != torch.uint8 or blocks_NB.shape[1:] != (k // 32 * block_bytes,):
        raise ValueError(
            f"rows of {k} in {kind} are uint8 ({k // 32 * block_bytes},), not {blocks_NB.dtype} "
            f"{tuple(blocks_NB.shape[1:])}"
        )
    blocks = blocks_NB.reshape(-1, block_bytes)
    head = blocks[:, : 2 * heads].contiguous().view(torch.float16).double()
    q = blocks[:, 2 * heads :].contiguous()
    if kind == "Q8_0":
        value = q.view(torch.int8).double()
    else:
        value = torch.cat([q & 15, q >> 4], dim=1).double() - (8 if kind == "Q4_0" else 0)
    value = value * head[:, :1]
    return (value + head[:, 1:] if heads == 2 else value).reshape(len(blocks_NB), k)


def _keys_of(attend: Attend, rows: range) -> list[tuple[slice, Tensor]]:
    """Some rows and the places of their keys in the sequence's pages: rows of a tree one by one."""
    if not rows:
        return []
    found: list[tuple[slice, Tensor]] = []
    tree = attend.tree
    for row in rows if tree is not None else ():
        assert tree is not None
        path = tree.paths[tree.path_start_T1[row] : tree.path_start_T1[row + 1]].long()
        if len(path):
            start = int(attend.positions_T[row]) + 1 - len(path)
            found.append((slice(row, row + 1), torch.cat([torch.arange(start), start + path])))
    if found:
        return found
    return [(slice(rows.start, rows.stop), torch.arange(int(attend.positions_T[rows[-1]]) + 1))]


def _quantised(x_TGD: Tensor) -> Tensor:
    """int8 values of each head and behind them its scale, in bytes."""
    scale_TG1 = x_TGD.float().abs().amax(-1, keepdim=True) / 127
    scale_TG1[~x_TGD.isfinite().all(-1, keepdim=True)] = torch.nan
    values_TGD = (x_TGD.float() / scale_TG1).round().nan_to_num(0.0)
    return torch.cat([values_TGD.to(torch.int8), scale_TG1.view(torch.int8)], -1)


def _widened(stored_LGD: Tensor, dtype: torch.dtype) -> Tensor:
    if stored_LGD.dtype != torch.int8:
        return stored_LGD.to(dtype)
    scale_LG1 = stored_LGD[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return stored_LGD[..., :-SCALE_BYTES].to(dtype) * scale_LG1.to(dtype)


def _attend_one(
    q_RHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, hidden_RL: Tensor, sinks_H: Tensor | None
) -> Tensor:
    """Scaled rows of one sequence over its keys."""
    rows, heads = q_RHD.shape[:2]
    kv_len, kv_heads, _ = k_LGD.shape
    k_LHD = k_LGD.repeat_interleave(heads // kv_heads, dim=1)
    v_LHD = v_LGD.repeat_interleave(heads // kv_heads, dim=1)
    scores_HRL = torch.einsum("rhd,lhd->hrl", q_RHD, k_LHD)
    scores_HRL.masked_fill_(hidden_RL[None], float("-inf"))
    if sinks_H is not None:
        sinks_HR1 = sinks_H.to(q_RHD.dtype)[:, None, None].expand(heads, rows, 1)
        scores_HRL = torch.cat([scores_HRL, sinks_HR1], -1)
    return torch.einsum("hrl,lhd->rhd", scores_HRL.softmax(-1)[..., :kv_len], v_LHD)


def _pages_of(pool: Tensor, table_P: Tensor, place_T: Tensor) -> tuple[Tensor, Tensor]:
    """Page and offset of positions of the sequence with this page table."""
    page_size = pool.shape[1]
    page_T = table_P.long()[place_T // page_size]
    if page_T.numel() and not 0 <= int(page_T.min()) <= int(page_T.max()) < len(pool):
        raise ValueError(f"a page is outside [0, {len(pool)})")
    return page_T, place_T % page_size


def _check_group(kind: str, cp: int, lengths: Sequence[int]) -> None:
    if kind not in ("interleave", "zigzag"):
        raise ValueError(f"a context-parallel split is 'interleave' or 'zigzag', not {kind!r}")
    if cp < 1:
        raise ValueError(f"cp is {cp}: at least 1")
    if min(lengths, default=0) < 0:
        raise ValueError("a length is negative")


def _places(kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
    pages, page_size = kv.k_PSHD.shape[:2]
    slots_T = slots_T.long()
    if slots_T.numel() and not 0 <= int(slots_T.min()) <= int(slots_T.max()) < pages * page_size:
        raise ValueError(f"a slot is outside [0, {pages * page_size})")
    return slots_T // page_size, slots_T % page_size
