"""Mixtures of experts: Qwen3-MoE and Mixtral. Each expert computes the rows routed to it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aserve.models import dense, exchange
from aserve.models.decoder import Mlp, SwiGlu
from aserve.models.spec import Experts, Fields, ModelSpec, sliding_window
from aserve.models.split import Split
from aserve.models.weights.loader import Matrix, Weights
from aserve.tensor.ops import Ops
from aserve.tensor.tokens import Tokens

EXPERT_AXES = ("moe_tp",)  # of one expert's rows and columns; whole experts go over "ep"
MIXTRAL_NAMES = ("w1", "w3", "w2")
QWEN_NAMES = ("gate_proj", "up_proj", "down_proj")


class Mixture:
    """sum over the chosen experts of weight * expert(x); weights by softmax of the router.

    A row's sum is taken over its experts in ascending order, wherever they are, so it depends
    neither on the other rows nor on the layout.
    """

    def __init__(
        self, at: str, spec: ModelSpec, weights: Weights, ops: Ops, names: tuple[str, str, str]
    ) -> None:
        assert spec.experts is not None
        self.spec, self.ops = spec.experts, ops
        router = Matrix(f"{at}.gate", self.spec.count, spec.hidden, coarsest="bf16")
        self.router = weights.linear(router)
        sizes = (spec.hidden, self.spec.inner)
        whole = Split(0, ("ep",), units=self.spec.count)
        self.held = weights.held(whole, self.spec.count)
        self.experts = []
        for number in self.held:
            gate, up, down = (f"{at}.experts.{number}.{name}" for name in names)
            self.experts.append(SwiGlu((gate, up, down), sizes, weights, ops, EXPERT_AXES))

    def __call__(self, x_TH: Tensor, tokens: Tokens) -> Tensor:
        grid = tokens.seat.grid
        if grid.tp > 1:
            way = exchange.by_rows if grid.layout.experts == "all_to_all" else exchange.gathered
            return way(self, x_TH, tokens)
        chosen_TK, weight_TK = self.route(x_TH)
        out_TH = torch.zeros_like(x_TH)
        for number, expert in zip(self.held, self.experts, strict=True):
            rows, places = torch.where(chosen_TK == number)
            if len(rows):
                out_TH[rows] += expert.whole(x_TH[rows]) * weight_TK[rows, places, None]
        return out_TH

    def route(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(experts, weights), each [T, per_token]."""
        logits_TE = self.ops.linear(x_TH, self.router)
        weight_TK, chosen_TK = logits_TE.softmax(-1).topk(self.spec.per_token)
        if self.spec.renormalise:
            weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
        return chosen_TK, weight_TK

    def route_ascending(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """`route`, each row's experts in ascending order."""
        chosen_TK, weight_TK = self.route(x_TH)
        chosen_TK, order_TK = chosen_TK.sort(-1)
        return chosen_TK, weight_TK.gather(-1, order_TK)


def qwen3_mlp(spec: ModelSpec, layer: int, weights: Weights, ops: Ops) -> Mlp:
    assert spec.experts is not None
    if layer not in spec.experts.layers:
        return dense.mlp_of(spec, layer, weights, ops)
    return Mixture(f"model.layers.{layer}.mlp", spec, weights, ops, QWEN_NAMES)


def mixtral_mlp(spec: ModelSpec, layer: int, weights: Weights, ops: Ops) -> Mlp:
    at = f"model.layers.{layer}.block_sparse_moe"
    return Mixture(at, spec, weights, ops, MIXTRAL_NAMES)


def qwen3_moe(fields: Fields) -> dict[str, Any]:
    step = fields.count("decoder_sparse_step", 1)
    dense_only = fields.config.get("mlp_only_layers") or ()
    sparse = lambda layer: layer not in dense_only and (layer + 1) % step == 0  # noqa: E731
    inner = fields.count("moe_intermediate_size")
    experts = _experts(fields, inner, fields.flag("norm_topk_prob", False), sparse)
    return {**dense.qwen3(fields), "experts": experts}


def mixtral(fields: Fields) -> dict[str, Any]:
    inner = fields.count("intermediate_size")
    experts = _experts(fields, inner, True, lambda layer: True)
    return {"window": sliding_window(fields.config), "experts": experts}


def _experts(
    fields: Fields, inner: int, renormalise: bool, sparse: Callable[[int], bool]
) -> Experts:
    layers = frozenset(filter(sparse, range(fields.count("num_hidden_layers"))))
    # transformers 4 and 5 spell it differently.
    name = "num_experts" if "num_experts" in fields.config else "num_local_experts"
    n_experts, per_token = fields.count(name), fields.count("num_experts_per_tok")
    if per_token > n_experts:
        fields.findings.append(f"{per_token} of {n_experts} experts cannot be chosen")
    return Experts(n_experts, per_token, inner, renormalise, layers)
