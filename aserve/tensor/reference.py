"""The plain torch twin of every native operation: slow, short, any float dtype.

It defines what the native kernels must compute. It makes no promise about bits.
"""

import dataclasses

import torch
from torch import Tensor

from aserve.tensor.collective import sum_blocks
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.ops import Linear as LinearProtocol
from aserve.tensor.rope import RopeTable


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceLinear:
    """The weight as it came; a bfloat16 one is kept widened, with its dtype remembered."""

    weight_NK: Tensor
    bias_N: Tensor | None
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
        if row_blocks < 1 or k % row_blocks:
            raise ValueError(f"K = {k} does not split into {row_blocks} equal blocks")
        if bias_N is not None and bias_N.shape != (n,):
            raise ValueError(f"bias has shape {tuple(bias_N.shape)}, the weight has {n} rows")
        wide = torch.float32 if weight_NK.dtype == torch.bfloat16 else weight_NK.dtype
        bias = None if bias_N is None else bias_N.to(wide)
        return ReferenceLinear(weight_NK.to(wide), bias, weight_NK.dtype, row_blocks)

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
            table_VH = table_VH.weight_NK
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
        page_T, offset_T = _places(kv, slots_T)
        kv.k_PSHD[page_T, offset_T] = k_TGD.to(kv.k_PSHD.dtype)
        kv.v_PSHD[page_T, offset_T] = v_TGD.to(kv.v_PSHD.dtype)

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

    def attention(self, q_THD: Tensor, kv: KvLayer, attend: Attend, scale: float) -> Tensor:
        out = torch.empty_like(q_THD)
        row_start = attend.row_start_M.tolist()
        for n, pages_P in enumerate(attend.page_table_NP):
            rows = slice(row_start[n], row_start[n + 1])
            if rows.start == rows.stop:
                continue
            position_R = attend.positions_T[rows].long()
            k, v = self._sequence_kv(kv, pages_P, int(position_R[-1]) + 1)
            out[rows] = _attend_one(q_THD[rows], k, v, position_R, scale)
        return out

    def _sequence_kv(self, kv: KvLayer, pages_P: Tensor, kv_len: int) -> tuple[Tensor, Tensor]:
        page_size = kv.k_PSHD.shape[1]
        place = torch.arange(kv_len)
        slots = pages_P.long()[place // page_size] * page_size + place % page_size
        return self.kv_gather(kv, slots)


def _attend_one(
    q_RHD: Tensor, k_LGD: Tensor, v_LGD: Tensor, position_R: Tensor, scale: float
) -> Tensor:
    """One sequence: rows at some positions over the keys up to the last of them."""
    heads = q_RHD.shape[1]
    kv_len, kv_heads, _ = k_LGD.shape
    if k_LGD.dtype == torch.bfloat16:  # as the native kernel does; sums stay in float32
        q_RHD = q_RHD.bfloat16().to(q_RHD.dtype)
    k_LHD = k_LGD.to(q_RHD.dtype).repeat_interleave(heads // kv_heads, dim=1)
    v_LHD = v_LGD.to(q_RHD.dtype).repeat_interleave(heads // kv_heads, dim=1)
    scores_HRL = torch.einsum("rhd,lhd->hrl", q_RHD, k_LHD) * scale
    hidden_RL = torch.arange(kv_len)[None, :] > position_R[:, None]
    scores_HRL.masked_fill_(hidden_RL[None], float("-inf"))
    return torch.einsum("hrl,lhd->rhd", scores_HRL.softmax(-1), v_LHD)


def _places(kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
    pages, page_size = kv.k_PSHD.shape[:2]
    slots_T = slots_T.long()
    if slots_T.numel() and not 0 <= int(slots_T.min()) <= int(slots_T.max()) < pages * page_size:
        raise ValueError(f"a slot is outside [0, {pages * page_size})")
    return slots_T // page_size, slots_T % page_size
