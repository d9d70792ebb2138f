"""Layers by the blocks that come with `Ops`: one native call between two collectives, and one for
all layers where there are none. Decided once, when a model is loaded.

What blocks do not cover goes operation by operation: attention under context parallelism, whose KV
is gathered half way, and the routing of experts.
"""

from collections.abc import Sequence

from torch import Tensor

from aserve.models.decoder import Attention, Layer, Model, Step, SwiGlu
from aserve.models.mixture import Mixture
from aserve.tensor.blocks import (
    AttentionBlock,
    AttentionPart,
    Blocks,
    BlockStep,
    MlpBlock,
    MlpPart,
    blocks_of,
)
from aserve.tensor.ops import KvLayer
from aserve.tensor.tokens import Tokens, in_one_call


def fuse(model: Model) -> None:
    """Lead `model.through` over blocks, if its `Ops` come with some."""
    blocks = blocks_of(model.ops)
    if blocks is None:
        return
    is_dense = all(isinstance(layer.mlp, SwiGlu) for layer in model.layers)
    model.through = (
        Whole(model, blocks) if model.grid.tp == 1 and is_dense else Apart(model, blocks)
    )


class Whole:
    """A stage of one rank without experts: all of its layers in one call."""

    def __init__(self, model: Model, blocks: Blocks) -> None:
        layers = [
            (blocks.attention(attention_part(layer)), blocks.mlp(mlp_part(layer)))
            for layer in model.layers
        ]
        norm_H = model.norm if model.is_last else None
        self.model = model
        self.blocks, self.stack = blocks, blocks.stack(layers, norm_H, model.spec.eps)

    def __call__(self, x_TH: Tensor, kv: Sequence[KvLayer], step: Step) -> Tensor:
        rows, stage = self.blocks.step(step.attend, step.rope), self.model.stage
        here = [number for number in self.model.captured if number in stage]
        if not here:
            return self.stack(x_TH, kv, rows)
        places = [number - stage.start for number in here]
        x_TH, entering = self.stack.capturing(x_TH, kv, rows, places)
        step.seen.update(zip(here, entering, strict=True))
        return x_TH


class Apart:
    """Layer by layer, each half in one call where there is a block for it."""

    def __init__(self, model: Model, blocks: Blocks) -> None:
        self.model, self.blocks = model, blocks
        self.is_cut = model.grid.cp > 1
        self.layers = [FusedLayer(layer, blocks, self.is_cut) for layer in model.layers]

    def __call__(self, x_TH: Tensor, kv: Sequence[KvLayer], step: Step) -> Tensor:
        rows = None if self.is_cut else self.blocks.step(step.attend, step.rope)
        added_TH, model = None, self.model
        for number, layer, pages in zip(model.stage, self.layers, kv, strict=True):
            x_TH, added_TH = layer.attend(x_TH, added_TH, pages, step, rows)
            if number in model.captured:
                step.seen[number] = x_TH
            x_TH, added_TH = layer.mix(x_TH, added_TH, step.tokens)
        return model.finish(x_TH, added_TH)


class FusedLayer:
    """A `Layer` whose halves are blocks, `is_cut` if context parallelism cuts its rows."""

    def __init__(self, layer: Layer, blocks: Blocks, is_cut: bool) -> None:
        self.plain = layer
        self.attention: AttentionBlock | None = None
        if not is_cut:
            self.attention = blocks.attention(attention_part(layer))
        self.mlp: MlpBlock | None = None
        if isinstance(layer.mlp, SwiGlu):
            self.mlp = layer.mlp.block = blocks.mlp(mlp_part(layer))
        elif isinstance(layer.mlp, Mixture):
            for expert in layer.mlp.experts:
                expert.block = blocks.mlp(_gated_part(expert, layer))

    def attend(
        self,
        x_TH: Tensor,
        added_TH: Tensor | None,
        kv: KvLayer,
        step: Step,
        rows: BlockStep | None,
    ) -> tuple[Tensor, Tensor]:
        block, out, tokens = self.attention, self.plain.attention.out, step.tokens
        if block is None or rows is None:
            return self.plain.attend(x_TH, added_TH, kv, step)
        if not out.is_split:
            return block.whole(x_TH, added_TH, kv, rows)
        if in_one_call(tokens.n_local, out.row_bytes(x_TH)):
            x_TH, parts_BTH = block.parts(x_TH, added_TH, kv, rows)
            return x_TH, out.settle(tokens.seat.attn_tp.all_reduce(parts_BTH))
        x_TH, out_TK = block.attended(x_TH, added_TH, kv, rows)
        return x_TH, self.plain.attention.add_up(out_TK, x_TH, tokens)

    def mix(self, x_TH: Tensor, added_TH: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        block, mlp = self.mlp, self.plain.mlp
        if block is None or not isinstance(mlp, SwiGlu):
            return self.plain.mix(x_TH, added_TH, tokens)
        if not mlp.down.is_split:
            return block.whole(x_TH, added_TH)
        # Rows are gathered between norm and gate where ranks hold different ones.
        is_gathered = tokens.seat.rows.size > 1
        if is_gathered or not in_one_call(tokens.n_rows, mlp.down.row_bytes(x_TH)):
            return self.plain.mix(x_TH, added_TH, tokens)
        x_TH, parts_BTH = block.parts(x_TH, added_TH)
        return x_TH, mlp.down.settle(tokens.seat.tp.all_reduce(parts_BTH))


def attention_part(layer: Layer) -> AttentionPart:
    return part_of(layer.attention, layer.norm_in)


def part_of(of: Attention, norm_H: Tensor | None) -> AttentionPart:
    return AttentionPart(
        norm_H=norm_H,
        qkv=of.qkv,
        out=of.out.weight,
        q_norm_D=of.q_norm,
        k_norm_D=of.k_norm,
        heads=of.heads,
        kv_heads=of.kv_heads,
        dim=of.dim,
        eps=of.eps,
        scale=of.scale,
    )


def mlp_part(layer: Layer) -> MlpPart:
    assert isinstance(layer.mlp, SwiGlu)
    return MlpPart(layer.norm_mlp, layer.mlp.gate_up, layer.mlp.down.weight, layer.eps)


def _gated_part(expert: SwiGlu, layer: Layer) -> MlpPart:
    return MlpPart(None, expert.gate_up, expert.down.weight, layer.eps)
