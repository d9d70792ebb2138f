"""The legible experts: copies share out the rows, ep ranks the experts, moe_tp ranks the units.

Either every rank of a copy looks at all its rows, or rows travel to their experts and back.
"""

import numpy as np
import torch

from aserve.tensor.collective import Collective
from aserve.tensor.tokens import Seat, even_shares
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints, to_ints, to_tensor


class ExpertRank:
    """One rank's share of the experts of every layer."""

    def __init__(self, seat: Seat) -> None:
        grid = seat.grid
        self._grid = grid
        self._place = seat.place
        self._plane = seat.layer
        self._kind = grid.layout.experts
        self._experts = model.EXPERTS // grid.ep
        units = model.UNITS // grid.moe_tp
        self._units = slice(self._place.moe_tp * units, (self._place.moe_tp + 1) * units)

    def mixed(self, layer: int, hidden: Ints) -> Ints:
        """What the experts say of all rows of the stage, the same on every rank."""
        counts = even_shares(len(hidden), self._grid.moe_dp)
        first = sum(counts[: self._place.moe_dp])
        copied = hidden[first : first + counts[self._place.moe_dp]]
        summed = (
            self._travel(layer, copied)
            if self._kind == "all_to_all"
            else (self._gathered(layer, copied))
        )
        return to_ints(self._plane.group("moe_dp").all_gather(to_tensor(summed), counts))

    def _gathered(self, layer: int, hidden: Ints) -> Ints:
        part = np.zeros(len(hidden), dtype=np.uint64)
        for experts in model.chosen_experts(layer, hidden):
            mine = experts // np.uint64(self._experts) == self._place.ep
            part[mine] += model.expert(layer, hidden[mine], experts[mine], self._units)
        return to_ints(self._plane.group("experts").all_reduce(to_tensor(part)[None]))

    def _travel(self, layer: int, hidden: Ints) -> Ints:
        """This rank sends its share of the copy's rows to the ranks of their experts."""
        ep = self._plane.group("ep")
        shares = even_shares(len(hidden), ep.size)
        first = sum(shares[: ep.rank])
        mine = hidden[first : first + shares[ep.rank]]
        experts = model.chosen_experts(layer, mine)  # [PER_ROW, rows]
        pairs = np.stack([np.tile(mine, model.PER_ROW), experts.reshape(-1)], axis=1)
        owners = (pairs[:, 1] // np.uint64(self._experts)).astype(np.int64)
        order = np.argsort(owners, kind="stable")
        sent = np.bincount(owners, minlength=ep.size).tolist()
        received = self._exchanged(ep, sent)
        there = to_ints(ep.all_to_all(to_tensor(pairs[order]), sent, received), flat=False)
        part = model.expert(layer, there[:, 0], there[:, 1], self._units)
        whole = self._plane.group("moe_tp").all_reduce(to_tensor(part)[None])
        back = to_ints(ep.all_to_all(whole.contiguous(), received, sent))
        said = np.empty(len(pairs), dtype=np.uint64)
        said[order] = back
        summed = said.reshape(model.PER_ROW, -1).sum(0, dtype=np.uint64)
        return to_ints(ep.all_gather(to_tensor(summed), shares))

    def _exchanged(self, ep: Collective, sent: list[int]) -> list[int]:
        """How many rows come from each rank: values decide, so the counts travel first."""
        ones = [1] * ep.size
        counts = torch.tensor(sent, dtype=torch.float64)[:, None]
        return [int(count) for count in ep.all_to_all(counts, ones, ones)[:, 0]]
