"""EAGLE-3 heads: three of the target's inner rows, one layer, a norm, a vocabulary of its own.

x = [norm(embed(token t + 1)); norm(h)] enters an attention of twice the width; h = h + attention,
h = h + mlp(norm(h)); logits of token t + 2 = lm_head(norm(h)). Where the target has been, h is
fc(what entered three of its layers at t); after that the layer's own h, before the norm (Li et al.
2025, "EAGLE-3: Scaling up Inference Acceleration via Training-Time Test").
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.decoder import Attention, Ends, Rotary, Step
from aserve.models.eagle import FusedDraft, draft_region, step_of
from aserve.models.eagle_spec import EMBEDDING, HeadSpec, Renamed, Shared, mlp_of
from aserve.models.fused import part_of
from aserve.models.regions import Region
from aserve.models.split import WHOLE
from aserve.models.weights.loader import Matrix, Weights
from aserve.tensor.blocks import Blocks, DraftPart, MlpPart
from aserve.tensor.ops import Attend, KvLayer, Ops
from aserve.tensor.tokens import Seat


class Eagle3Head:
    nbytes = 0  # set by the loader
    target_ids: Tensor | None = None  # of the draft vocabulary, set by the loader; None: it is all

    def __init__(self, spec: HeadSpec, weights: Weights, ops: Ops, shared: Shared | None) -> None:
        """`shared` None: only the names of its parameters are wanted."""
        layers, hidden = spec.layers, spec.layers.hidden
        self.spec, self.ops, self.eps = spec, ops, layers.eps
        if spec.has_table:
            self.table = weights.table(EMBEDDING, layers.vocab, hidden, WHOLE)
        elif shared is not None:
            self.table = shared.table
        self.fc = weights.linear(Matrix("fc", hidden, spec.feature_len, bias=spec.fc_bias))
        inside = "model.layers.0."
        named = Renamed(weights, inside, spec.prefix)
        self.norm_embedding = named.vector(f"{inside}input_layernorm.weight", hidden)
        self.norm_hidden = named.vector(f"{inside}hidden_norm.weight", hidden)
        self.attention = Attention(layers, 0, named, ops, width=2 * hidden)
        self.norm_mlp = named.vector(f"{inside}post_attention_layernorm.weight", hidden)
        self.mlp = mlp_of(layers, 0, named, ops)
        self.norm = weights.vector("norm.weight", hidden)
        self.head = weights.linear(Matrix("lm_head", spec.draft_vocab, hidden, coarsest="int8"))
        self.rotary = Rotary(layers, None)
        self.seat = Seat(Grid(Layout()), 0, None, ops)
        self.fused: FusedDraft | None = None

    def fuse(self, blocks: Blocks) -> None:
        mlp = MlpPart(self.norm_mlp, self.mlp.gate_up, self.mlp.down.weight, self.eps)
        norms = self.norm_embedding, self.norm_hidden
        attention = part_of(self.attention, None)
        ids_V = None if self.target_ids is None else self.target_ids.to(torch.int32)
        part = DraftPart(
            norms, attention, mlp, self.norm, self.head, self.table, fc=None, ids_V=ids_V
        )
        self.fused = FusedDraft(blocks, part)

    def regions(self) -> tuple[Region, ...]:
        return (draft_region(self.spec),)

    def start(self, features_TF: Tensor) -> Tensor:
        return self.ops.linear(features_TF, self.fc)

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, kv: Sequence[KvLayer], attend: Attend
    ) -> Tensor:
        both_TE, step = self._enter(ids_T, hidden_TH, kv, attend)
        return self._mix(hidden_TH, self.attention(both_TE, kv[0], step), step)

    def draft(
        self,
        ids_T: Tensor,
        hidden_TH: Tensor,
        kv: Sequence[KvLayer],
        attend: Attend,
        ends: Ends | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self.fused is not None:
            step = step_of(self.seat, self.rotary, kv[0], attend)
            embedded_TH = self.ops.embed(self.table, ids_T)
            return self.fused(embedded_TH, hidden_TH, kv[0], step, ends)
        if ends is None:
            out_TH = self.forward(ids_T, hidden_TH, kv, attend)
        else:
            both_TE, step = self._enter(ids_T, hidden_TH, kv, attend)
            added_NH = self.attention.at_ends(both_TE, kv[0], step, ends)
            out_TH = self._mix(hidden_TH[ends.rows_N], added_NH, step)
        return out_TH, self.logits(out_TH)

    def _enter(
        self, ids_T: Tensor, hidden_TH: Tensor, kv: Sequence[KvLayer], attend: Attend
    ) -> tuple[Tensor, Step]:
        """What attention takes: [T, embedding and hidden, each normed]."""
        ops = self.ops
        embedded_TH = ops.rms_norm(ops.embed(self.table, ids_T), self.norm_embedding, self.eps)
        normed_TH = ops.rms_norm(hidden_TH, self.norm_hidden, self.eps)
        both_TE = torch.cat((embedded_TH, normed_TH), dim=1)
        return both_TE, step_of(self.seat, self.rotary, kv[0], attend)

    def _mix(self, x_TH: Tensor, added_TH: Tensor, step: Step) -> Tensor:
        x_TH, normed_TH = self.ops.add_rms_norm(x_TH, added_TH, self.norm_mlp, self.eps)
        return self.ops.add(x_TH, self.mlp(normed_TH, step.tokens))

    def logits(self, hidden_TH: Tensor) -> Tensor:
        return self.ops.linear(self.ops.rms_norm(hidden_TH, self.norm, self.eps), self.head)

    def token_ids(self, drafted: Tensor) -> Tensor:
        return drafted.long() if self.target_ids is None else self.target_ids[drafted.long()]
