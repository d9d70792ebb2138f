"""EAGLE-1 and EAGLE-2 heads: the target's next feature from its last one and the token after it.

h' = layers(fc([embed(token t + 1); f_t])), logits of token t + 2 = the target's own head of h' (Li
et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty"). The two
versions have the same head; they differ in the tree.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.core.message import Drafting
from aserve.core.tree import Draft
from aserve.models.decoder import Attention, Ends, Layer, Rotary, Step
from aserve.models.eagle_spec import EMBEDDING, HeadSpec, Renamed, Shared, mlp_of
from aserve.models.fused import part_of
from aserve.models.regions import Region, kv_region
from aserve.models.split import WHOLE
from aserve.models.weights.loader import Matrix, Weights
from aserve.tensor.blocks import Blocks, DraftPart, DraftRoots, MlpPart
from aserve.tensor.ops import Attend, KvLayer, Ops
from aserve.tensor.tokens import Seat, Tokens


class FusedDraft:
    """The block of a head's layer."""

    def __init__(self, blocks: Blocks, part: DraftPart) -> None:
        self.blocks, self.block = blocks, blocks.draft(part)

    def __call__(
        self,
        embedded_TH: Tensor | None,
        x_TH: Tensor,
        kv: KvLayer,
        step: Step,
        ends: Ends | None,
    ) -> tuple[Tensor, Tensor]:
        """As `DraftBlock`."""
        rows, last = self.blocks.step(step.attend, step.rope), None
        if ends is not None:
            last = ends.rows_N, self.blocks.step(ends.attend, step.rope)
        return self.block(embedded_TH, x_TH, kv, rows, last)

    def grow(self, kv: KvLayer, rotary: Rotary, roots: DraftRoots, size: Drafting) -> list[Draft]:
        places = (roots.page_table_NP.shape[1] + roots.pages_each) * kv.k_PSHD.shape[1]
        tokens_NT, parents_NT = self.block.grow(kv, rotary.upto(places), roots, size)
        trees = zip(tokens_NT.tolist(), parents_NT.tolist(), strict=True)
        return [Draft(tuple(tokens), tuple(parents)) for tokens, parents in trees]


class FirstLayer:
    """A decoder layer whose attention takes its rows as they are: fc stands for its first norm."""

    def __init__(self, spec: HeadSpec, weights: Weights, ops: Ops) -> None:
        layers = spec.layers
        self.attention = Attention(layers, 0, weights, ops)
        name = "model.layers.0.post_attention_layernorm.weight"
        self.norm_mlp = weights.vector(name, layers.hidden)
        self.mlp = mlp_of(layers, 0, weights, ops)
        self.eps, self.ops = layers.eps, ops

    def __call__(
        self, x_TH: Tensor, kv: KvLayer, step: Step, ends: Ends | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x, what is still to be added to it), of the rows of `ends` if there are any."""
        if ends is None:
            added_TH = self.attention(x_TH, kv, step)
        else:
            added_TH = self.attention.at_ends(x_TH, kv, step, ends)
            x_TH = x_TH[ends.rows_N]
        x_TH, normed_TH = self.ops.add_rms_norm(x_TH, added_TH, self.norm_mlp, self.eps)
        return x_TH, self.mlp(normed_TH, step.tokens)


class EagleHead:
    nbytes = 0  # set by the loader

    def __init__(self, spec: HeadSpec, weights: Weights, ops: Ops, shared: Shared | None) -> None:
        """`shared` None: only the names of its parameters are wanted."""
        layers, hidden = spec.layers, spec.layers.hidden
        self.spec, self.ops = spec, ops
        if spec.has_table:
            self.table = weights.table(EMBEDDING, layers.vocab, hidden, WHOLE)
        elif shared is not None:
            self.table = shared.table
        if shared is not None:
            self.head = shared.head
        named = Renamed(weights, "model.layers.0.", spec.prefix)
        rest = Renamed(weights, "model.layers.", "layers.")
        self.fc = weights.linear(Matrix("fc", hidden, 2 * hidden, bias=spec.fc_bias))
        self.first = FirstLayer(spec, named, ops)
        self.rest = [Layer(layers, n, rest, ops, mlp_of) for n in range(1, layers.layers)]
        self.rotary = Rotary(layers, None)
        self.seat = Seat(Grid(Layout()), 0, None, ops)
        self.fused: FusedDraft | None = None

    def fuse(self, blocks: Blocks) -> None:
        if self.rest:
            return
        first = self.first
        mlp = MlpPart(first.norm_mlp, first.mlp.gate_up, first.mlp.down.weight, first.eps)
        attention = part_of(first.attention, None)
        part = DraftPart(None, attention, mlp, None, self.head, self.table, self.fc)
        self.fused = FusedDraft(blocks, part)

    def regions(self) -> tuple[Region, ...]:
        return (draft_region(self.spec),)

    def start(self, features_TF: Tensor) -> Tensor:
        return features_TF

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, kv: Sequence[KvLayer], attend: Attend
    ) -> Tensor:
        x_TH, step = self._enter(ids_T, hidden_TH, kv, attend)
        x_TH, added_TH = self.first(x_TH, kv[0], step)
        for layer, pages in zip(self.rest, kv[1:], strict=True):
            x_TH, added_TH = layer(x_TH, added_TH, pages, step)
        return self.ops.add(x_TH, added_TH)

    def draft(
        self,
        ids_T: Tensor,
        hidden_TH: Tensor,
        kv: Sequence[KvLayer],
        attend: Attend,
        ends: Ends | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.rest:  # whose KV takes all rows of the first layer
            out_TH = self.forward(ids_T, hidden_TH, kv, attend)
            out_TH = out_TH if ends is None else out_TH[ends.rows_N]
            return out_TH, self.logits(out_TH)
        x_TH, step = self._enter(ids_T, hidden_TH, kv, attend)
        if self.fused is not None:
            return self.fused(None, x_TH, kv[0], step, ends)
        out_TH = self.ops.add(*self.first(x_TH, kv[0], step, ends))
        return out_TH, self.logits(out_TH)

    def _enter(
        self, ids_T: Tensor, hidden_TH: Tensor, kv: Sequence[KvLayer], attend: Attend
    ) -> tuple[Tensor, Step]:
        embedded_TH = self.ops.embed(self.table, ids_T)
        x_TH = self.ops.linear(torch.cat((embedded_TH, hidden_TH), dim=1), self.fc)
        return x_TH, step_of(self.seat, self.rotary, kv[0], attend)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        return self.ops.linear(hidden_TH, self.head)

    def token_ids(self, drafted: Tensor) -> Tensor:
        return drafted.long()


def draft_region(spec: HeadSpec) -> Region:
    """KV of the head's layers, numbered from 0, whole on each rank that drafts."""
    layers = spec.layers
    region = kv_region(tuple(range(layers.layers)), layers.kv_heads, layers.head_dim, layers.dtype)
    return dataclasses.replace(region, name="draft_kv", axes=())


def step_of(seat: Seat, rotary: Rotary, kv: KvLayer, attend: Attend) -> Step:
    """No position of a row is beyond the slots of its sequence, as in `Model.forward`."""
    positions = attend.page_table_NP.shape[1] * kv.k_PSHD.shape[1]
    return Step(Tokens(seat, [[len(attend.positions_T)]]), attend, rotary.upto(positions))
