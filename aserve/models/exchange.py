"""How rows reach experts that other ranks hold, and come back as sums: two forms, the same bits.

Gathered: each copy of the experts takes its share of all rows, every rank computes its experts on
them, and what is not its own is zero. By rows: each rank sends its rows to the ranks whose experts
they chose. Both add partial sums block by block, then weigh, then add up the experts of a row in
ascending order.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aserve.models.decoder import SwiGlu
from aserve.tensor.collective import Collective, sum_blocks
from aserve.tensor.tokens import Seat, Tokens, even_shares, rows_max


class Routed(Protocol):
    """What is asked of a mixture; `held` are the numbers of the experts in `experts`."""

    held: range
    experts: list[SwiGlu]

    def route_ascending(self, x_TH: Tensor) -> tuple[Tensor, Tensor]: ...


def gathered(mixture: Routed, x_TH: Tensor, tokens: Tokens) -> Tensor:
    """[rows of this rank, H] of the same."""
    seat = tokens.seat
    shares = even_shares(tokens.n_rows, seat.moe_dp.size)
    start, n_rows = sum(shares[: seat.moe_dp.rank]), shares[seat.moe_dp.rank]
    x_MH = tokens.to_global(x_TH)[start : start + n_rows]
    chosen_MK, weight_MK = mixture.route_ascending(x_MH)
    step = _rows_max(mixture, x_MH, chosen_MK)
    sums = [
        _sum_over_ranks(mixture, *some, seat.experts)
        for some in zip(*(x.split(step) for x in (x_MH, chosen_MK, weight_MK)), strict=True)
        if len(some[0])
    ]
    out_MH = torch.cat(sums) if sums else x_MH
    return seat.moe_dp.all_gather(out_MH, shares)[tokens.local]


def _sum_over_ranks(
    mixture: Routed, x_MH: Tensor, chosen_MK: Tensor, weight_MK: Tensor, ranks: Collective
) -> Tensor:
    """[M, H]: what the experts of all `ranks` give; each rank weighs and adds up a part of M."""
    counts = even_shares(len(x_MH), ranks.size)
    slot_RKH = ranks.reduce_scatter(_slots(mixture, x_MH, chosen_MK), counts)
    return ranks.all_gather(_weigh(slot_RKH, weight_MK.split(counts)[ranks.rank]), counts)


def _n_blocks(mixture: Routed) -> int:
    """Of the partial sums that an expert gives on this rank, as on every other."""
    return mixture.experts[0].down.n_blocks


def _rows_max(mixture: Routed, x_TH: Tensor, chosen_TK: Tensor) -> int:
    """Of one round, on every rank the same."""
    return rows_max(chosen_TK.shape[1] * mixture.experts[0].down.row_bytes(x_TH))


def _slots(mixture: Routed, x_MH: Tensor, chosen_MK: Tensor) -> Tensor:
    """[B, M, K, H]: for each row and each of its experts what this rank adds, zero if nothing."""
    slots_BMKH = x_MH.new_zeros(_n_blocks(mixture), *chosen_MK.shape, x_MH.shape[1])
    for number, expert in zip(mixture.held, mixture.experts, strict=True):
        rows, places = torch.where(chosen_MK == number)
        if len(rows):
            slots_BMKH[:, rows, places] = expert.partial(x_MH[rows])
    return slots_BMKH


def by_rows(mixture: Routed, x_TH: Tensor, tokens: Tokens) -> Tensor:
    """[rows of this rank, H] of the same."""
    x_SH = tokens.slice(x_TH)
    chosen_SK, weight_SK = mixture.route_ascending(x_SH)
    step = _rows_max(mixture, x_SH, chosen_SK)
    # As many rounds as the rank with most rows needs.
    sums = [
        _send_rows(mixture, *(x[at : at + step] for x in (x_SH, chosen_SK, weight_SK)), tokens.seat)
        for at in range(0, max(tokens.slices), step)
    ]
    return tokens.join(sums[0] if len(sums) == 1 else torch.cat(sums))


def _send_rows(
    mixture: Routed, x_SH: Tensor, chosen_SK: Tensor, weight_SK: Tensor, seat: Seat
) -> Tensor:
    """[S, H]: what the experts of all ranks give, each rank sending rows of its own."""
    grid = seat.grid
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
    return _weigh(slot_RH.view(n_rows, per_token, x_SH.shape[1]), weight_SK)


def _compute(mixture: Routed, rows_RH: Tensor, asked_RN: Tensor) -> Tensor:
    """[R, B, H] of rows that came rank by rank, in each by expert, `asked_RN` of them."""
    n_ranks, held = asked_RN.shape
    expert_R = torch.arange(held).repeat(n_ranks).repeat_interleave(asked_RN.flatten())
    parts_RBH = rows_RH.new_empty(len(rows_RH), _n_blocks(mixture), rows_RH.shape[1])
    for number, expert in enumerate(mixture.experts):
        (rows,) = torch.where(expert_R == number)
        if len(rows):
            parts_RBH[rows] = expert.partial(rows_RH[rows]).transpose(0, 1)
    return parts_RBH


def _of_experts(back_RBH: Tensor, counts: Sequence[int], moe_tp: int) -> list[tuple[Tensor, ...]]:
    """For each place of `ep` what its `moe_tp` ranks sent back."""
    by_rank = back_RBH.split(list(counts))
    return [by_rank[at : at + moe_tp] for at in range(0, len(by_rank), moe_tp)]


def _weigh(slot_RKH: Tensor, weight_RK: Tensor) -> Tensor:
    """Sum of the weighted experts of each row, from left to right."""
    return sum_blocks((slot_RKH * weight_RK[..., None]).transpose(0, 1)).contiguous()
