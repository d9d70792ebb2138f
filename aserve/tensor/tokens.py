"""Which rank holds which rows of a step, and the ways between the regions of a layer.

In the attention region a rank holds the rows of its (dp, cp), in the MLP region all rows, in stage
order: (dp, cp) by (dp, cp), in each the share that context parallelism cuts. Everything here
follows from the row counts of the plan; an axis of size 1 costs nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aserve.core.layout import Grid
from aserve.tensor.collective import LayerPlane, OnlyRank
from aserve.tensor.ops import Ops
from aserve.tensor.reference import ReferenceOps

Rows = npt.NDArray[np.int64]
PART_BYTES_MAX = 32 << 20  # of a rank's partial sums in one call; more rows take several


class Seat:
    """One rank of a grid with the collectives of its stage."""

    def __init__(
        self, grid: Grid, rank: int, layer: LayerPlane | None = None, ops: Ops | None = None
    ) -> None:
        """Without a layer plane the stage must be one rank; without `ops` the twin cuts rows."""
        assert layer is not None or grid.tp == 1, grid.tp
        self.ops: Ops = ReferenceOps() if ops is None else ops
        self.grid, self.rank, self.place = grid, rank, grid.place(rank)
        self.layer = OnlyRank() if layer is None else layer
        self.inside = rank % grid.tp  # its number in the stage
        self.attn_tp, self.cp, self.rows, self.tp, self.experts, self.moe_dp = (
            self.layer.group(name) for name in ("attn_tp", "cp", "rows", "tp", "experts", "moe_dp")
        )
        self.is_leader = rank == grid.leader(self.place.dp)  # draws the tokens of its DP group


@dataclasses.dataclass(frozen=True, slots=True)
class Picked:
    """Some rows of a step, the same on every rank of the stage, in stage order.

    `counts[g]` are of DP group g. `back` puts this rank's group's rows into the order in which they
    were asked for; None: they are.
    """

    x_WH: Tensor
    counts: tuple[int, ...]
    back: Tensor | None


class Tokens:
    """The rows of one step. `lengths[g][n]`: rows of sequence n of DP group g."""

    def __init__(self, seat: Seat, lengths: Sequence[Sequence[int]]) -> None:
        grid = seat.grid
        assert len(lengths) == grid.dp, (len(lengths), grid.dp)
        self.seat = seat
        totals = [sum(group) for group in lengths]
        self.n_rows = sum(totals)  # of the whole stage
        self.order_G: Rows | None = None  # plan rows in stage order; None: plan order
        self.counts = tuple(totals)  # of each (dp, cp)
        if grid.cp > 1:
            self._cut(lengths, totals)
        place = seat.place
        first = place.dp * grid.cp
        self.cp_counts = self.counts[first : first + grid.cp]
        mine = first + place.cp
        start = sum(self.counts[:mine])
        self.local = slice(start, start + self.counts[mine])  # of stage order
        self.n_local = self.counts[mine]
        # Of each rank of the stage; those of one (dp, cp) share its rows.
        self.slices = tuple(
            size for count in self.counts for size in even_shares(count, grid.attn_tp)
        )
        at = mine * grid.attn_tp
        self.slice_counts = self.slices[at : at + grid.attn_tp]

    def _cut(self, lengths: Sequence[Sequence[int]], totals: Sequence[int]) -> None:
        grid, place, index = self.seat.grid, self.seat.place, self.seat.ops.cp_index
        kind, cp = grid.layout.cp_split, grid.cp
        cut = [
            [index(kind, cp, rank, group).numpy().astype(np.int64) for rank in range(cp)]
            for group in lengths
        ]
        self.counts = tuple(len(share) for shares in cut for share in shares)
        orders = [np.concatenate(shares) for shares in cut]
        firsts = np.cumsum([0, *totals])
        self.group_order: Rows = orders[place.dp]  # of this group's rows, cp rank by cp rank
        self.local_order: Rows = cut[place.dp][place.cp]
        self.order_G = np.concatenate([o + at for o, at in zip(orders, firsts, strict=False)])

    def to_global(self, x_TH: Tensor) -> Tensor:
        """This rank's rows -> all rows of the stage, in stage order."""
        rows = self.seat.rows
        return x_TH if rows.size == 1 else rows.all_gather(x_TH, self.counts)

    def to_local(self, parts_BGH: Tensor) -> Tensor:
        """[B, all rows, H], partial sums of every rank of the stage -> the sums of our rows."""
        seat = self.seat
        if seat.rows.size == 1:
            return seat.tp.all_reduce(parts_BGH)
        return self.join(seat.tp.reduce_scatter(parts_BGH, self.slices))

    def add_up(self, x_GH: Tensor, partial: Callable[[Tensor], Tensor], row_bytes: int) -> Tensor:
        """All rows of the stage -> the sums of our rows over `partial` of every rank of the stage,
        which gives [B, rows, H] of `row_bytes` a row: the same as `to_local(partial(x_GH))`."""
        step = rows_max(row_bytes)
        if self.n_rows <= step:
            return self.to_local(partial(x_GH))
        seat = self.seat
        if seat.rows.size == 1:
            return torch.cat([seat.tp.all_reduce(partial(x)) for x in x_GH.split(step)])
        ends = np.cumsum(self.slices)
        sums = []
        for start in range(0, self.n_rows, step):
            stop = min(start + step, self.n_rows)
            counts = np.diff(ends.clip(start, stop), prepend=start).tolist()
            sums.append(seat.tp.reduce_scatter(partial(x_GH[start:stop]), counts))
        return self.join(torch.cat(sums))

    def add_up_shared(
        self, x_TH: Tensor, partial: Callable[[Tensor], Tensor], row_bytes: int
    ) -> Tensor:
        """This rank's rows -> their sums over the ranks of `attn_tp`, which hold the same rows."""
        attn_tp, step = self.seat.attn_tp, rows_max(row_bytes)
        if self.n_local <= step:
            return attn_tp.all_reduce(partial(x_TH))
        return torch.cat([attn_tp.all_reduce(partial(x)) for x in x_TH.split(step)])

    def slice(self, x_TH: Tensor) -> Tensor:
        """This rank's rows -> its 1/attn_tp of them: every row of a stage in exactly one place."""
        if self.seat.attn_tp.size == 1:
            return x_TH
        start = sum(self.slice_counts[: self.seat.attn_tp.rank])
        return x_TH[start : start + self.slice_counts[self.seat.attn_tp.rank]]

    def join(self, x_SH: Tensor) -> Tensor:
        """The inverse of `slice`."""
        attn_tp = self.seat.attn_tp
        return x_SH if attn_tp.size == 1 else attn_tp.all_gather(x_SH, self.slice_counts)

    def whole_sequence(self, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """k and v of this rank's rows -> of all rows of its group, cp rank by cp rank."""
        cp, heads = self.seat.cp, k_TGD.shape[1]
        if cp.size == 1:
            return k_TGD, v_TGD
        both = cp.all_gather(torch.cat((k_TGD, v_TGD), dim=1), self.cp_counts)
        return both[:, :heads], both[:, heads:]

    def whole_group(self, x_TH: Tensor) -> Tensor:
        """This rank's rows -> all rows of its DP group, in the plan's order."""
        cp = self.seat.cp
        if cp.size == 1:
            return x_TH
        cut_TH = cp.all_gather(x_TH, self.cp_counts)
        whole_TH = torch.empty_like(cut_TH)
        whole_TH[torch.from_numpy(self.group_order)] = cut_TH
        return whole_TH

    def pick(self, x_TH: Tensor, rows: Sequence[int]) -> Picked:
        """Rows of `x_TH` by their ascending numbers in the plan, gathered from all ranks."""
        if self.seat.tp.size == 1:
            if len(rows) == self.n_rows:
                picked = x_TH
            elif rows and rows[-1] - rows[0] == len(rows) - 1:
                picked = x_TH[rows[0] : rows[-1] + 1]
            else:
                picked = x_TH[list(rows)]
            return Picked(picked, (len(rows),), None)
        grid, wanted = self.seat.grid, np.asarray(rows, dtype=np.int64)
        if self.order_G is not None:
            place_G = np.empty_like(self.order_G)
            place_G[self.order_G] = np.arange(self.n_rows)
            wanted = place_G[wanted]
        order = np.argsort(wanted)
        wanted = wanted[order]
        ends = np.searchsorted(wanted, np.cumsum(self.counts))
        counts = np.diff(ends, prepend=0).tolist()
        local = wanted[(wanted >= self.local.start) & (wanted < self.local.stop)]
        mine_TH = x_TH[torch.from_numpy(local - self.local.start)]
        x_WH = mine_TH if self.seat.rows.size == 1 else self.seat.rows.all_gather(mine_TH, counts)
        of_group = [sum(counts[g * grid.cp : (g + 1) * grid.cp]) for g in range(grid.dp)]
        back = None
        if grid.cp > 1:
            start = sum(of_group[: self.seat.place.dp])
            ours = order[start : start + of_group[self.seat.place.dp]]
            back = torch.from_numpy(np.argsort(ours))
        return Picked(x_WH, tuple(of_group), back)


def rows_max(row_bytes: int) -> int:
    """How many rows of partial sums a rank may have at once: the same on all ranks."""
    return max(1, PART_BYTES_MAX // row_bytes)


def in_one_call(n_rows: int, row_bytes: int) -> bool:
    """Whether partial sums of so many rows, of `row_bytes` each, may be had at once."""
    return n_rows <= rows_max(row_bytes)


def even_shares(count: int, places: int) -> list[int]:
    """`count` in contiguous shares that differ by one at most."""
    return [count * (n + 1) // places - count * n // places for n in range(places)]
