"""Blocks with random weights over a shuffled pool, and the same by the operations one by one."""

import dataclasses

import torch
from torch import Tensor

from aserve.tensor.blocks import AttentionPart, MlpPart
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.rope import RopeTable, rope_table
from tests.tensor.pools import Pool, random_keys

LENGTHS, OWN = (5, 70, 1, 33), (1, 6, 1, 3)  # of four sequences; the last rows of each are computed


@dataclasses.dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    rot: int = 0  # 0: all of dim
    bias: bool = False
    head_norms: bool = False
    blocks: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        marks = [mark for mark in ("bias", "head_norms") if getattr(self, mark)]
        numbers = (self.hidden, self.heads, self.kv_heads, self.dim, self.inner, self.blocks)
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join(map(str, (*numbers, kind, *marks)))


SIZES = (
    Sizes(64, 4, 2, 16, 96, blocks=2),
    Sizes(64, 4, 2, 16, 96, dtype=torch.float32, bias=True),
    Sizes(96, 9, 3, 64, 256, bias=True, head_norms=True, blocks=4),
    Sizes(50, 5, 1, 18, 37, rot=6, bias=True),  # nothing is a multiple of anything
    Sizes(192, 9, 3, 64, 576, blocks=3),
    Sizes(80, 2, 2, 128, 64, head_norms=True, dtype=torch.float32, blocks=2),
)


class Case:
    """A layer's weights, a pool and rows of four sequences in it."""

    def __init__(self, ops: NativeOps, sizes: Sizes, seed: int = 0, page_size: int = 7) -> None:
        self.ops, self.sizes, self.eps = ops, sizes, 1e-5
        self.draw = torch.Generator().manual_seed(seed)
        hidden, dim = sizes.hidden, sizes.dim
        q_len, both = sizes.heads * dim, (sizes.heads + 2 * sizes.kv_heads) * dim
        self.attention_part = AttentionPart(
            norm_H=1 + self.noise(hidden),
            qkv=self.packed(both, hidden, 1),
            out=self.packed(hidden, q_len, sizes.blocks if q_len % sizes.blocks == 0 else 1),
            q_norm_D=1 + self.noise(dim) if sizes.head_norms else None,
            k_norm_D=1 + self.noise(dim) if sizes.head_norms else None,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            dim=dim,
            eps=self.eps,
            scale=dim**-0.5,
        )
        blocks = sizes.blocks if sizes.inner % sizes.blocks == 0 else 1
        self.mlp_part = MlpPart(
            norm_H=1 + self.noise(hidden),
            gate_up=self.packed(2 * sizes.inner, hidden, 1),
            down=self.packed(hidden, sizes.inner, blocks),
            eps=self.eps,
        )
        keys = [random_keys(i, n, 1, sizes.kv_heads, dim) for i, n in enumerate(LENGTHS)]
        self.pool = Pool(ops, keys, page_size, sizes.dtype, seed)
        for n, (length, own) in enumerate(zip(LENGTHS, OWN, strict=True)):
            self.pool.write(n, 0, length - own)
        fraction = sizes.rot / dim if sizes.rot else 1.0
        self.rope = rope_table({"partial_rotary_factor": fraction}, dim, max(LENGTHS))
        self.blocks = ops.blocks
        assert self.blocks is not None
        self.attention = self.blocks.attention(self.attention_part)
        self.mlp = self.blocks.mlp(self.mlp_part)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw)

    def packed(self, n: int, k: int, row_blocks: int) -> object:
        weight = (self.noise(n, k) * k**-0.5).to(self.sizes.dtype)
        return self.ops.pack(weight, self.noise(n) if self.sizes.bias else None, row_blocks)

    def attend(self, wanted: tuple[int, ...] = (0, 1, 2, 3)) -> Attend:
        """The own rows of the wanted sequences."""
        rows = [(n, LENGTHS[n] - OWN[n], LENGTHS[n]) for n in wanted]
        made = self.pool.step(rows)
        slots = [self.pool.slots(n, begin, end) for n, begin, end in rows]
        return dataclasses.replace(made, slots_T=torch.cat(slots))

    def copied(self) -> KvLayer:
        kv = self.pool.kv
        return KvLayer(kv.k_PSHD.clone(), kv.v_PSHD.clone())


def attended_plainly(
    case: Case, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, attend: Attend
) -> tuple[Tensor, Tensor]:
    """(x, [T, heads * dim]) by `Ops`."""
    ops, part, sizes = case.ops, case.attention_part, case.sizes
    if added_TH is None:
        normed_TH = ops.rms_norm(x_TH, part.norm_H, part.eps)
    else:
        x_TH, normed_TH = ops.add_rms_norm(x_TH, added_TH, part.norm_H, part.eps)
    parts = (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    qkv_TAD = ops.linear(normed_TH, part.qkv).view(-1, sum(parts), sizes.dim)
    q_THD, k_TGD, v_TGD = qkv_TAD.split_with_sizes(parts, 1)
    if part.q_norm_D is not None and part.k_norm_D is not None:
        q_THD = ops.rms_norm(q_THD, part.q_norm_D, part.eps)
        k_TGD = ops.rms_norm(k_TGD, part.k_norm_D, part.eps)
    ops.rope(q_THD, k_TGD, attend.positions_T, case.rope)
    ops.kv_append(k_TGD, v_TGD, kv, attend.slots_T)
    out = ops.attention(q_THD, kv, attend, part.scale)
    return x_TH, out.view(-1, sizes.heads * sizes.dim)


def mixed_plainly(case: Case, x_TH: Tensor, added_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x + added, its norm, what `down` is to take) by `Ops`."""
    ops, part = case.ops, case.mlp_part
    assert part.norm_H is not None
    x_TH, normed_TH = ops.add_rms_norm(x_TH, added_TH, part.norm_H, part.eps)
    return x_TH, normed_TH, ops.silu_mul(ops.linear(normed_TH, part.gate_up))


def layer_plainly(
    case: Case, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, attend: Attend
) -> tuple[Tensor, Tensor]:
    ops = case.ops
    x_TH, out_TK = attended_plainly(case, x_TH, added_TH, kv, attend)
    x_TH, _, inner_TF = mixed_plainly(case, x_TH, ops.linear(out_TK, case.attention_part.out))
    return x_TH, ops.linear(inner_TF, case.mlp_part.down)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal, a NaN being equal to the same NaN."""
    kind = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.view(kind), b.view(kind))


def same_pools(a: KvLayer, b: KvLayer) -> bool:
    return same_bits(a.k_PSHD, b.k_PSHD) and same_bits(a.v_PSHD, b.v_PSHD)


def longer(rope: RopeTable) -> RopeTable:
    return RopeTable(torch.cat((rope.cos_sin_PR, rope.cos_sin_PR)).contiguous())
