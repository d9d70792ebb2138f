"""The blocks of a pre-norm decoder: attention, SwiGLU, layer, and the stack of them as `Model`.

A block asks for its parameters where it is constructed, each with its name, shape and split; the
rest of the code knows tensors and what `Tokens` offers, never ranks or files.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from aserve.core.layout import Grid
from aserve.models.regions import Region, kv_region
from aserve.models.spec import ModelSpec
from aserve.models.split import TILE, Split
from aserve.models.weights.loader import HEAD, TABLE, Matrix, Weights
from aserve.tensor.blocks import MlpBlock
from aserve.tensor.ops import Attend, KvLayer, Ops
from aserve.tensor.rope import RopeTable, inv_freq
from aserve.tensor.tokens import Seat, Tokens, even_shares

BLOCK_COLUMNS = 96  # a row block is long enough that adding blocks up costs little
BLOCK_COUNTS = (12, 8, 6, 4, 3, 2)  # 12 serves 2, 3, 4, 6 and 12 ranks
POSITIONS_MIN = 2048  # of the first rotary table
HIDDEN, FEATURE = "hidden", "feature_"  # after the final norm; what enters a layer
ATTENTION, MLP = ("attn_tp",), ("tp",)
VOCAB = Split(0, ("tp",))


class Mlp(Protocol):
    def __call__(self, x_TH: Tensor, tokens: Tokens) -> Tensor: ...


class Through(Protocol):
    """From the rows that enter a stage to those that leave it."""

    def __call__(self, x_TH: Tensor, kv: Sequence[KvLayer], step: "Step") -> Tensor: ...


MlpOf = Callable[[ModelSpec, int, Weights, Ops], Mlp]  # the MLP of a layer, by its global index


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What the layers share in one step; what enters those that are captured is left in `seen`, by
    their global index."""

    tokens: Tokens
    attend: Attend
    rope: RopeTable
    seen: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """The rows of a step that go on, N of them (int64), and what each sees."""

    rows_N: Tensor
    attend: Attend


def feature_of(layer: int) -> str:
    """The name of what enters a layer: the sum of all before it."""
    return f"{FEATURE}{layer}"


def row_blocks(k: int) -> int:
    """In how many blocks a row-parallel sum over k is taken: whatever the layout, so that the sum
    of ranks that hold whole blocks has the bits of one rank's."""
    whole = [n for n in BLOCK_COUNTS if k % (TILE * n) == 0]
    long = [n for n in whole if k // n >= BLOCK_COLUMNS]
    return next(iter(long or whole), 1)


class Attention:
    """Grouped-query attention over paged KV, with optional biases and q/k norms (Qwen3)."""

    def __init__(
        self, spec: ModelSpec, layer: int, weights: Weights, ops: Ops, width: int | None = None
    ) -> None:
        """`width` is that of the rows it takes, where it is not the hidden size."""
        at = f"model.layers.{layer}.self_attn"
        dim, hidden = spec.head_dim, spec.hidden
        wide = width or hidden
        # Contiguous shares keep a query head with the KV head it reads, copied or not.
        groups = Split(0, ATTENTION, units=spec.kv_heads, replicas=True)
        heads = dataclasses.replace(groups, units=spec.heads, replicas=False)
        q_len, kv_len = spec.heads * dim, spec.kv_heads * dim
        self.qkv = weights.linear(
            Matrix(f"{at}.q_proj", q_len, wide, heads, spec.qkv_bias),
            Matrix(f"{at}.k_proj", kv_len, wide, groups, spec.qkv_bias),
            Matrix(f"{at}.v_proj", kv_len, wide, groups, spec.qkv_bias),
        )
        columns = dataclasses.replace(heads, dim=1)
        self.out = weights.row_parallel(
            Matrix(f"{at}.o_proj", hidden, q_len, columns, spec.out_bias), spec.kv_heads
        )
        self.q_norm = weights.vector(f"{at}.q_norm.weight", dim) if spec.qk_norm else None
        self.k_norm = weights.vector(f"{at}.k_norm.weight", dim) if spec.qk_norm else None
        self.heads = len(weights.held(heads, spec.heads))
        self.kv_heads = len(weights.held(groups, spec.kv_heads))
        self.parts = (self.heads, self.kv_heads, self.kv_heads)
        self.n_parts, self.q_len = sum(self.parts), self.heads * dim
        self.dim, self.eps, self.scale, self.ops = dim, spec.eps, dim**-0.5, ops

    def __call__(self, x_TH: Tensor, kv: KvLayer, step: Step) -> Tensor:
        out_TK = self.read(self.place(x_TH, kv, step), kv, step.attend)
        if not self.out.is_split:
            return self.ops.linear(out_TK, self.out.weight)
        return self.add_up(out_TK, x_TH, step.tokens)

    def place(self, x_TH: Tensor, kv: KvLayer, step: Step) -> Tensor:
        """Write k and v of all rows; q_THD of theirs."""
        ops, attend, seat = self.ops, step.attend, step.tokens.seat
        qkv_TAD = ops.linear(x_TH, self.qkv).view(-1, self.n_parts, self.dim)
        q_THD, k_TGD, v_TGD = qkv_TAD.split_with_sizes(self.parts, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD = ops.rms_norm(q_THD, self.q_norm, self.eps)
            k_TGD = ops.rms_norm(k_TGD, self.k_norm, self.eps)
        ops.rope(q_THD, k_TGD, attend.positions_T, step.rope)
        if seat.cp.size > 1:
            k_TGD, v_TGD = step.tokens.whole_sequence(k_TGD, v_TGD)
        ops.kv_append(k_TGD, v_TGD, kv, attend.slots_T)
        return q_THD

    def read(self, q_THD: Tensor, kv: KvLayer, attend: Attend) -> Tensor:
        """[T, heads * dim]: what the output projection is to take."""
        return self.ops.attention(q_THD, kv, attend, self.scale).view(-1, self.q_len)

    def at_ends(self, x_TH: Tensor, kv: KvLayer, step: Step, ends: Ends) -> Tensor:
        """[N, H] of some rows; of the others only k and v are computed. For one rank."""
        q_THD = self.place(x_TH, kv, step)
        out_NK = self.read(q_THD[ends.rows_N], kv, ends.attend)
        return self.ops.linear(out_NK, self.out.weight)

    def add_up(self, out_TK: Tensor, x_TH: Tensor, tokens: Tokens) -> Tensor:
        """[T, H] like `x_TH`: the output projection over all ranks that hold heads of them."""
        partial = functools.partial(self.ops.linear_parts, weight=self.out.weight)
        return self.out.settle(tokens.add_up_shared(out_TK, partial, self.out.row_bytes(x_TH)))


class SwiGlu:
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), its inner columns split over `axes`.

    `names` are those of gate, up and down, `sizes` is (hidden, inner).
    """

    def __init__(
        self,
        names: tuple[str, str, str],
        sizes: tuple[int, int],
        weights: Weights,
        ops: Ops,
        axes: tuple[str, ...] = MLP,
        bias: bool = False,
    ) -> None:
        (gate, up, down), (hidden, inner) = names, sizes
        blocks = row_blocks(inner)
        rows = Split(0, axes, units=blocks, exact_only=True)
        self.gate_up = weights.linear(
            Matrix(gate, inner, hidden, rows, bias), Matrix(up, inner, hidden, rows, bias)
        )
        columns = dataclasses.replace(rows, dim=1)
        self.down = weights.row_parallel(Matrix(down, hidden, inner, columns, bias), blocks)
        self.ops = ops
        self.block: MlpBlock | None = None  # does what follows in one call

    def __call__(self, x_TH: Tensor, tokens: Tokens) -> Tensor:
        if not self.down.is_split:
            return self.whole(x_TH)
        x_GH, row_bytes = tokens.to_global(x_TH), self.down.row_bytes(x_TH)
        return self.down.settle(tokens.add_up(x_GH, self.partial, row_bytes))

    def whole(self, x_TH: Tensor) -> Tensor:
        """What a rank that holds all columns gives."""
        ops = self.ops
        if self.block is not None:
            return self.block.gated(x_TH)
        return ops.linear(ops.silu_mul(ops.linear(x_TH, self.gate_up)), self.down.weight)

    def partial(self, x_TH: Tensor) -> Tensor:
        """[B, T, H]: what this rank adds to the sum, block by block, without the bias."""
        ops = self.ops
        if not self.down.is_split:
            return self.whole(x_TH)[None]
        if self.block is not None:
            return self.block.gated_parts(x_TH)
        return ops.linear_parts(ops.silu_mul(ops.linear(x_TH, self.gate_up)), self.down.weight)


class Layer:
    """x += attention(norm(x)); x += mlp(norm(x)). The last addition is left to the next norm."""

    def __init__(
        self, spec: ModelSpec, layer: int, weights: Weights, ops: Ops, mlp_of: MlpOf
    ) -> None:
        at = f"model.layers.{layer}"
        self.norm_in = weights.vector(f"{at}.input_layernorm.weight", spec.hidden)
        self.attention = Attention(spec, layer, weights, ops)
        self.norm_mlp = weights.vector(f"{at}.post_attention_layernorm.weight", spec.hidden)
        self.mlp = mlp_of(spec, layer, weights, ops)
        self.eps, self.ops = spec.eps, ops

    def __call__(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: Step
    ) -> tuple[Tensor, Tensor]:
        """(x, what is still to be added to it)."""
        x_TH, added_TH = self.attend(x_TH, added_TH, kv, step)
        return self.mix(x_TH, added_TH, step.tokens)

    def attend(
        self, x_TH: Tensor, added_TH: Tensor | None, kv: KvLayer, step: Step
    ) -> tuple[Tensor, Tensor]:
        """The first half of it."""
        if added_TH is None:
            normed_TH = self.ops.rms_norm(x_TH, self.norm_in, self.eps)
        else:
            x_TH, normed_TH = self.ops.add_rms_norm(x_TH, added_TH, self.norm_in, self.eps)
        return x_TH, self.attention(normed_TH, kv, step)

    def mix(self, x_TH: Tensor, added_TH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """The second half of it."""
        x_TH, normed_TH = self.ops.add_rms_norm(x_TH, added_TH, self.norm_mlp, self.eps)
        return x_TH, self.mlp(normed_TH, tokens)


class Rotary:
    """Cosines and sines of the positions in use; made when needed, for a context may be long.

    `divisors` of the frequencies are what GGUF files hold for Llama 3's scaling.
    """

    def __init__(self, spec: ModelSpec, divisors: Tensor | None) -> None:
        self.frequencies, self.factor = inv_freq(spec.rope, spec.head_dim)
        if divisors is not None:
            self.frequencies = self.frequencies / divisors
        self.table = RopeTable(torch.empty(0, 0))

    def upto(self, positions: int) -> RopeTable:
        """A table of at least that many positions."""
        have = self.table.cos_sin_PR.shape[0]
        if positions > have:
            count = max(positions, 2 * have, POSITIONS_MIN)
            angles = torch.arange(count, dtype=torch.float32)[:, None] * self.frequencies[None, :]
            cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
            self.table = RopeTable(torch.cat((cos, sin), dim=1))
        return self.table


class Model:
    """What one rank holds: the layers of its stage; the embedding with the first, the head with the
    last. `grid` and `rank` say of which layout."""

    nbytes = 0  # of weights in memory, set by the loader
    features: tuple[str, ...] = ()  # what else is wanted of its rows
    captured: tuple[int, ...] = ()  # layers, of the whole model, whose input rows that takes

    def __init__(
        self, spec: ModelSpec, weights: Weights, ops: Ops, mlp_of: MlpOf, grid: Grid, rank: int
    ) -> None:
        self.spec, self.ops, self.grid, self.rank = spec, ops, grid, rank
        self.stage = grid.stage(spec.layers, grid.place(rank).pp)
        self.is_first, self.is_last = self.stage.start == 0, self.stage.stop == spec.layers
        # A tied table is one packed weight, which the embedding reads rows of.
        if self.is_first and not spec.tied:
            self.table = weights.table(TABLE, spec.vocab, spec.hidden, VOCAB)
        divisors = None
        if spec.rope_divisors:
            divisors = weights.vector("rope_freqs.weight", spec.head_dim // 2)
        self.layers = [Layer(spec, layer, weights, ops, mlp_of) for layer in self.stage]
        if self.is_last:
            self.norm = weights.vector("model.norm.weight", spec.hidden)
        if self.is_last or (self.is_first and spec.tied):
            name = TABLE if spec.tied else HEAD
            name = name.removesuffix(".weight")
            head = Matrix(name, spec.vocab, spec.hidden, VOCAB, coarsest="int8")
            self.head = weights.linear(head)
        self.vocab_held = weights.held(VOCAB, spec.vocab)
        self.rotary = Rotary(spec, divisors)
        self.through: Through = self.one_by_one

    def capture(self, features: Sequence[str]) -> None:
        """From now on keep of each row what `features` name, the same on every rank."""
        self.features = tuple(dict.fromkeys(features))
        layers = [int(name.removeprefix(FEATURE)) for name in self.features if name != HIDDEN]
        assert all(0 <= layer < self.spec.layers for layer in layers), (features, self.spec.layers)
        self.captured = tuple(sorted(layers))

    def regions(self) -> tuple[Region, ...]:
        """The KV of this stage's layers, as this rank holds it."""
        spec = self.spec
        heads = self.layers[0].attention.kv_heads
        return (kv_region(tuple(self.stage), heads, spec.head_dim, spec.dtype),)

    def forward(
        self,
        ids_G: Tensor,
        tokens: Tokens,
        kv: Sequence[KvLayer],
        attend: Attend,
        hidden_SH: Tensor | None = None,
        seen: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """float32 [T, hidden] of this rank's rows, after the final norm on the last stage.

        What enters those of the `captured` layers that are here goes to `seen`, each float32 [T,
        hidden].

        `ids_G` (int64) are the tokens of the whole stage, in stage order; `kv[i]` belongs to this
        stage's layer i. A stage that is not the first takes as `hidden_SH` this rank's
        `tokens.slice` of what the one before returned.
        """
        if self.is_first:
            x_TH = self._embed(ids_G, tokens)
        else:
            assert hidden_SH is not None
            x_TH = tokens.join(hidden_SH)
        # As many positions as there are slots: to look for the greatest would give up the
        # interpreter just before the layers are given their work.
        positions = attend.page_table_NP.shape[1] * kv[0].k_PSHD.shape[1]
        step = Step(tokens, attend, self.rotary.upto(positions), {} if seen is None else seen)
        return self.through(x_TH, kv, step)

    def one_by_one(self, x_TH: Tensor, kv: Sequence[KvLayer], step: Step) -> Tensor:
        """`through` by the operations of `Ops`."""
        added_TH = None
        for number, layer, pages in zip(self.stage, self.layers, kv, strict=True):
            x_TH, added_TH = layer.attend(x_TH, added_TH, pages, step)
            if number in self.captured:
                step.seen[number] = x_TH
            x_TH, added_TH = layer.mix(x_TH, added_TH, step.tokens)
        return self.finish(x_TH, added_TH)

    def finish(self, x_TH: Tensor, added_TH: Tensor | None) -> Tensor:
        """What the last layer of the stage gives -> what leaves the stage."""
        assert added_TH is not None
        if not self.is_last:
            return self.ops.add(x_TH, added_TH)
        return self.ops.add_rms_norm(x_TH, added_TH, self.norm, self.spec.eps)[1]

    def _embed(self, ids_G: Tensor, tokens: Tokens) -> Tensor:
        """Of this rank's rows. Each rank of the stage looks up what its part of the table has."""
        table, held = self.head if self.spec.tied else self.table, self.vocab_held
        if len(held) == self.spec.vocab:
            return self.ops.embed(table, ids_G)
        is_held_G = (ids_G >= held.start) & (ids_G < held.stop)
        found = self.ops.embed(table, ids_G[is_held_G] - held.start)
        part_GH = found.new_zeros(len(ids_G), self.spec.hidden)
        part_GH[is_held_G] = found
        return tokens.to_local(part_GH[None])

    def logits(self, hidden_WH: Tensor, counts: Sequence[int], seat: Seat) -> Tensor:
        """float32 [rows of its group, vocab] at the leader of each DP group, [0, vocab] elsewhere.

        `hidden_WH` and `counts`, the rows of each group in it, are the same on every rank.
        """
        part_WV = self.ops.linear(hidden_WH, self.head)
        grid, tp, vocab = self.grid, seat.tp, self.spec.vocab
        if tp.size == 1:
            return part_WV
        widths = even_shares(vocab, tp.size)
        if widths[tp.rank] < max(widths):
            part_WV = torch.nn.functional.pad(part_WV, (0, max(widths) - widths[tp.rank]))
        send = [0] * tp.size
        for dp, count in enumerate(counts):
            send[grid.leader(dp) % grid.tp] = count
        mine = send[tp.rank]
        got = tp.all_to_all(part_WV, send, [mine] * tp.size).view(tp.size, mine, max(widths))
        columns = [got[rank, :, :width] for rank, width in enumerate(widths)]
        return torch.cat(columns, dim=1)
