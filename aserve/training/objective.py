"""What is minimised: the published losses of EAGLE and EAGLE-3 over one batch of conversations."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aserve.training.network import Network, Weights

STEP_DECAY = 0.8  # of the weight of each further step of EAGLE-3's training-time test
REGRESSION, DISTILLATION = 1.0, 0.1  # EAGLE's two terms
NOISE = 0.2  # EAGLE's, uniform, for 512 tokens
CHUNK = 256  # rows of which logits over the whole vocabulary are held at once


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Conversations padded to one length L, features and target rows bfloat16.

    `wanted_BL` is how much the prediction of a token counts. `usable_BL` are places where the
    target's own choice can be drafted.
    """

    ids_BL: Tensor
    wanted_BL: Tensor
    features_BLF: Tensor
    hidden_BLH: Tensor
    usable_BL: Tensor

    @property
    def n_tokens(self) -> int:
        return int((self.ids_BL >= 0).sum())


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """The target's output rows of the head's vocabulary (all of them for EAGLE), bfloat16."""

    network: Network
    head_VH: Tensor
    steps: int


def loss(goal: Goal, w: Weights, batch: Batch, generator: torch.Generator) -> Tensor:
    if goal.network.spec.method == "eagle":
        return eagle_loss(goal, w, batch, generator)
    return eagle3_loss(goal, w, batch)


def eagle3_loss(goal: Goal, w: Weights, batch: Batch) -> Tensor:
    """sum_j 0.8^j CE(target's distribution over the draft vocabulary, the head's) of all steps.

    The target's distribution of token t + 1 stands at t. Row r of step j predicts token r + j + 2,
    so it is compared with what stands at r + j + 1. Places where the target's choice is outside of
    the draft vocabulary are left out.
    """
    network = goal.network
    counts_BT = _counts(batch)
    where_N2 = counts_BT.nonzero()
    rows_NH = batch.hidden_BLH[where_N2[:, 0], where_N2[:, 1]]
    wished_NV = likelihoods(rows_NH, goal.head_VH).to(goal.head_VH.dtype)
    counts_N = counts_BT[where_N2[:, 0], where_N2[:, 1]]
    total = torch.zeros(())
    ids_BT = batch.ids_BL[:, 1:].clamp(min=0)
    steps = network.unroll(w, ids_BT, batch.features_BLF[:, :-1], goal.steps)
    for step, hidden_BTH in enumerate(steps):
        rows_N = where_N2[:, 1] - 1 - step
        has_row = rows_N >= 0
        rows_MH = hidden_BTH[where_N2[has_row, 0], rows_N[has_row]]
        counts_M, wished_MV = counts_N[has_row], wished_NV[has_row]
        mean = SoftCrossEntropy.apply(
            network.said(w, rows_MH),
            w["lm_head.weight"],
            wished_MV.__getitem__,
            counts_M / counts_M.sum().clamp(min=1),
        )
        total = total + STEP_DECAY**step * mean
    return total


def eagle_loss(goal: Goal, w: Weights, batch: Batch, generator: torch.Generator) -> Tensor:
    """1.0 SmoothL1(h', the target's next feature) + 0.1 CE(softmax(head f), head h')."""
    network, length = goal.network, batch.ids_BL.shape[1]
    noise = torch.rand(batch.features_BLF.shape, generator=generator) - 0.5
    features = batch.features_BLF.float() + noise * (NOISE * 512 / length)
    counts_BT = _counts(batch)
    where_N2 = counts_BT.nonzero()
    where_N2 = where_N2[where_N2[:, 1] >= 1]
    counts_N = counts_BT[where_N2[:, 0], where_N2[:, 1]]
    ids_BT = batch.ids_BL[:, 1:].clamp(min=0)
    (hidden_BTH,) = network.unroll(w, ids_BT, features[:, :-1], 1)
    rows_NH = hidden_BTH[where_N2[:, 0], where_N2[:, 1] - 1].float()
    wished_NH = batch.hidden_BLH[where_N2[:, 0], where_N2[:, 1]].float()
    each_N = functional.smooth_l1_loss(rows_NH, wished_NH, reduction="none").mean(-1)
    total = counts_N.sum().clamp(min=1)
    regression = (each_N * counts_N).sum() / total
    apart = SoftCrossEntropy.apply(
        rows_NH,
        goal.head_VH,
        lambda part: likelihoods(wished_NH[part], goal.head_VH),
        counts_N / total,
    )
    return REGRESSION * regression + DISTILLATION * apart


def _counts(batch: Batch) -> Tensor:
    """[B, L - 1]: how much the target's distribution at each place counts."""
    return batch.wanted_BL[:, 1:] * batch.usable_BL[:, :-1]


@torch.no_grad()
def likelihoods(rows_NH: Tensor, head_VH: Tensor) -> Tensor:
    """float32 [N, V] of the tokens whose output rows these are."""
    return functional.linear(rows_NH.to(head_VH.dtype), head_VH).float().softmax(-1)


class SoftCrossEntropy(torch.autograd.Function):
    """sum_n counts_n CE(p_n, softmax(weight rows_n)), a few rows at a time: logits of all of them
    would fill the memory, or at least no cache. `p_of` gives p of a slice of rows. Gradients of
    `rows` and `weight` alone."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, p_of: Callable[[slice], Tensor], counts: Tensor
    ) -> Tensor:
        half = torch.bfloat16 if torch.is_autocast_enabled("cpu") else rows.dtype
        weight_VH, is_learnt = weight.to(half), weight.requires_grad
        total, of_rows = torch.zeros(()), torch.empty_like(rows)
        of_weight = torch.zeros_like(weight) if is_learnt else None
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            rows_NH, p_NV = rows[part].to(half), p_of(part).float()
            log_q = (rows_NH @ weight_VH.T).float().log_softmax(-1)
            total -= torch.linalg.vecdot(p_NV, log_q) @ counts[part]
            apart = log_q.exp_().sub_(p_NV).mul_(counts[part, None]).to(half)
            of_rows[part] = apart @ weight_VH
            if of_weight is not None:
                of_weight += apart.T @ rows_NH
        ctx.save_for_backward(of_rows, of_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_rows, of_weight = ctx.saved_tensors
        of_weight = None if of_weight is None else of_weight * grads[0]
        return of_rows * grads[0], of_weight, None, None


@torch.no_grad()
def chain_hits(goal: Goal, w: Weights, batch: Batch, ids_D: Tensor | None) -> Tensor:
    """bool [steps, B, L]: whether the token at a place is foreseen by a chain that has come so far.

    In step j that is the guess of the row j + 2 places before. `ids_D` are the target's ids of the
    draft vocabulary; None: it is all.
    """
    found = []
    ids_BT = batch.ids_BL[:, 1:].clamp(min=0)
    steps = goal.network.unroll(w, ids_BT, batch.features_BLF[:, :-1], goal.steps)
    for step, hidden_BTH in enumerate(steps):
        guess_BT = goal.network.logits(w, hidden_BTH, goal.head_VH).argmax(-1)
        if ids_D is not None:
            guess_BT = ids_D[guess_BT]
        hits_BL = torch.zeros(batch.ids_BL.shape, dtype=torch.bool)
        ahead = 2 + step
        rows = batch.ids_BL.shape[1] - ahead
        if rows > 0:
            hits_BL[:, ahead:] = guess_BT[:, :rows] == batch.ids_BL[:, ahead:]
        found.append(hits_BL)
    return torch.stack(found)
