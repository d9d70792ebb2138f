"""How rows reach experts that other ranks hold, and come back as sums: two forms, the same bits.

Gathered: each copy of the experts takes its share of all rows, every rank computes its experts on
them, and what is not its own is zero. By rows: each rank sends its rows to the ranks whose experts
they chose. Both add partial sums block by block, then weigh, then add up the experts of a row in
ascending order.
"""

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aserve.models.decoder import SwiGlu
from aserve.tensor.collective import sum_blocks
from aserve.tensor.tokens import Tokens, even_shares


class Routed(Protocol):
    """What is asked of a mixture; `held` are the numbers of the experts in `experts`."""

    held: range
    experts: list[SwiGlu]

    def route_ascending(self, x_TH: Tensor) -> tuple[Tensor, Tensor]: ...


def gathered(mixture: Routed, x_TH: Tensor, tokens: Tokens) -> Tensor:
    """[rows of this rank, H] of the same."""
    seat, grid = tokens.seat, tokens.seat.grid
    shares = even_shares(tokens.n_rows, grid.moe_dp)
    start, n_rows = sum(shares[: seat.place.moe_dp]), shares[seat.place.moe_dp]
    x_MH = tokens.to_global(x_TH)[start : start + n_rows]
    chosen_MK, weight_MK = mixture.route_ascending(x_MH)
    slots_BMKH = _slots(mixture, x_MH, chosen_MK)
    # Of each copy's share its ranks add up and weigh one part each.
    parts = [even_shares(share, seat.experts.size) for share in shares]
    counts = parts[seat.place.moe_dp]
    first = sum(counts[: seat.experts.rank])
    mine = slice(first, first + counts[seat.experts.rank])
    slot_RKH = seat.experts.reduce_scatter(slots_BMKH, counts)
    out_RH = _weigh(slot_RKH, weight_MK[mine])
    out_GH = seat.tp.all_gather(out_RH, list(itertools.chain(*parts)))
    return out_GH[tokens.local]


def _slots(mixture: Routed, x_MH: Tensor, chosen_MK: Tensor) -> Tensor:
    """[B, M, K, H]: for each row and each of its experts what this rank adds, zero if nothing."""
    slots_BMKH = None
    for number, expert in zip(mixture.held, mixture.experts, strict=True):
        rows, places = torch.where(chosen_MK == number)
        if len(rows) or slots_BMKH is None:
            part_BRH = expert.partial(x_MH[rows])
            if slots_BMKH is None:
                shape = (len(part_BRH), *chosen_MK.shape, x_MH.shape[1])
                slots_BMKH = x_MH.new_zeros(shape)
            slots_BMKH[:, rows, places] = part_BRH
    assert slots_BMKH is not None
    return slots_BMKH


def by_rows(mixture: Routed, x_TH: Tensor, tokens: Tokens) -> Tensor:
    """[rows of this rank, H] of the same."""
    seat, grid = tokens.seat, tokens.seat.grid
    x_SH = tokens.slice(x_TH)
    chosen_SK, weight_SK = mixture.route_ascending(x_SH)
    n_rows, per_token = chosen_SK.shape
    held = len(mixture.held)  # by every rank as many
    # Row-slots in the order of their experts, once for each rank that holds a part of one.
    chosen, order = chosen_SK.flatten().sort(stable=True)
    asked_EN = torch.bincount(chosen, minlength=grid.ep * held).view(grid.ep, held)
    by_ep = order.split(asked_EN.sum(1).tolist())
    sent = torch.cat([rows for rows in by_ep for _ in range(grid.moe_tp)])
    asked_RN = asked_EN.repeat_interleave(grid.moe_tp, dim=0)
    ones = [1] * seat.experts.size
    asked_of_us_RN = seat.experts.all_to_all(asked_RN, ones, ones)
    away, here = asked_RN.sum(1).tolist(), asked_of_us_RN.sum(1).tolist()
    rows_RH = seat.experts.all_to_all(x_SH[sent // per_token], away, here)
    parts_RBH = _compute(mixture, rows_RH, asked_of_us_RN)
    back_RBH = seat.experts.all_to_all(parts_RBH, here, away)
    slot_RH = x_SH.new_empty(n_rows * per_token, x_SH.shape[1])
    for rows, parts in zip(by_ep, _of_experts(back_RBH, away, grid.moe_tp), strict=True):
        slot_RH[rows] = sum_blocks(torch.cat([part.transpose(0, 1) for part in parts]))
    slot_SKH = slot_RH.view(n_rows, per_token, x_SH.shape[1])
    return tokens.join(_weigh(slot_SKH, weight_SK))


def _compute(mixture: Routed, rows_RH: Tensor, asked_RN: Tensor) -> Tensor:
    """[R, B, H] of rows that came rank by rank, in each by expert, `asked_RN` of them."""
    n_ranks, held = asked_RN.shape
    expert_R = torch.arange(held).repeat(n_ranks).repeat_interleave(asked_RN.flatten())
    parts_RBH = None
    for number, expert in enumerate(mixture.experts):
        (rows,) = torch.where(expert_R == number)
        if len(rows) or parts_RBH is None:
            part_BRH = expert.partial(rows_RH[rows])
            if parts_RBH is None:
                parts_RBH = rows_RH.new_empty(len(rows_RH), len(part_BRH), rows_RH.shape[1])
            parts_RBH[rows] = part_BRH.transpose(0, 1)
    assert parts_RBH is not None
    return parts_RBH


def _of_experts(back_RBH: Tensor, counts: Sequence[int], moe_tp: int) -> list[tuple[Tensor, ...]]:
    """For each place of `ep` what its `moe_tp` ranks sent back."""
    by_rank = back_RBH.split(list(counts))
    return [by_rank[at : at + moe_tp] for at in range(0, len(by_rank), moe_tp)]


def _weigh(slot_RKH: Tensor, weight_RK: Tensor) -> Tensor:
    """Sum of the weighted experts of each row, from left to right."""
    return sum_blocks((slot_RKH * weight_RK[..., None]).transpose(0, 1)).contiguous()
