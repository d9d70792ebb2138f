"""One rank of a legible model: integers in a real page pool, sums by the layer plane's collectives.

Takes the place of aserve.runner.runner.Runner in any layout. Every rank computes its own share
only, so what it leaves out, doubles, sends astray or reads from the wrong page changes the text.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.core.layout import Grid
from aserve.core.message import Result, StepPlan, StepReport
from aserve.core.planner import CacheSpec
from aserve.core.replica import Replica, RowsView
from aserve.tensor.collective import LayerPlane
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints, Shape, to_ints, to_tensor
from aserve.testing.drafts import Guess
from aserve.testing.draws import Drawer
from aserve.testing.experts import ExpertRank
from aserve.testing.kv_pool import IntegerPool, Look
from aserve.testing.spread import Indices, Spread


@dataclasses.dataclass(frozen=True)
class Part:
    """What all ranks of a legible deployment have in common."""

    grid: Grid
    shape: Shape
    cache: CacheSpec
    cp_split: str = "interleave"
    experts: str = "gathered"
    draft_max: int = 0


@dataclasses.dataclass(frozen=True)
class Work:
    """One plan's rows; `inward` is what the stage before sends: name -> (shape, dtype)."""

    step: int
    views: tuple[RowsView, ...]
    mine: tuple[RowsView, ...]  # of this rank's attention group
    spread: Spread
    inward: dict[str, tuple[tuple[int, ...], torch.dtype]]
    digest: int
    micros: int


@dataclasses.dataclass(frozen=True)
class Outward:
    bundle: dict[str, Tensor]
    results: tuple[Result, ...]
    digest: int
    micros: int


class StageRows:
    """A rank's view of its group's rows: all slots in group order, and what its own rows see."""

    def __init__(self, views: Sequence[RowsView], own_from: dict[int, int], local: Indices) -> None:
        self.looks = [Look(view, own_from[view.rows.seq]) for view in views]
        starts = np.cumsum([0, *(look.n_rows for look in self.looks)])
        self.slots: Indices = np.concatenate(
            [look.slots[look.start :] for look in self.looks] or [np.zeros(0, dtype=np.int64)]
        )
        # Of each sequence with rows here: where they are among them, and which of its rows.
        self.seen: list[tuple[Look, Indices, Indices]] = []
        for look, first in zip(self.looks, starts[:-1], strict=True):
            places = np.flatnonzero((local >= first) & (local < first + look.n_rows))
            if len(places):
                self.seen.append((look, places, local[places] - first))


def cost_micros(view: RowsView) -> int:
    """Virtual time that a sequence's rows take: more the longer what they look back on."""
    return 10 * view.n_rows + view.n_rows * view.kv_len // 8


class LegibleStage:
    """A runner for `run_rank`. `guess` tells the drafter what is right."""

    def __init__(self, rank: int, part: Part, layer: LayerPlane, guess: Guess) -> None:
        grid = part.grid
        place = grid.place(rank)
        self.rank = rank
        self.part = part
        self.place = place
        self.layers = grid.stage(part.shape.layers, place.pp)
        self.replica = Replica(part.cache.page_size)
        per_rank = model.HEADS // grid.attn_tp
        self.heads = slice(place.attn_tp * per_rank, (place.attn_tp + 1) * per_rank)
        self.pool = IntegerPool(part.cache, self.layers, per_rank)
        self.is_last = place.pp == grid.pp - 1
        self.is_leader = rank == grid.leader(place.dp)
        self._layer = layer
        self._own_from: dict[int, int] = {}  # where the prefix that others wrote ends
        self._experts = ExpertRank(grid, rank, layer, part.experts)
        self._drawer = Drawer(part.shape.vocab, part.draft_max, guess)

    def apply(self, plan: StepPlan) -> Work:
        """Bookkeeping; asserts that the plan follows from those before it."""
        applied = self.replica.apply(plan)
        for seq, slots_from, slots_to in applied.moves:
            self.pool.move(seq, slots_from, slots_to)
        for seq in plan.drops:
            del self._own_from[seq]
        for admit in plan.admits:
            self._own_from[admit.seq] = admit.kv_len
        views = applied.views
        counts_G: list[list[int]] = [[] for _ in plan.batches]
        for view in views:
            counts_G[view.group].append(view.n_rows)
        spread = Spread(self.part.grid, counts_G, self.part.cp_split)
        mine = tuple(view for view in views if view.group == self.place.dp)
        inward = {}
        if self.place.pp:
            count = spread.slices(self.rank)[self.place.attn_tp]
            inward["hidden"] = ((count, 1), torch.float64)
        micros = sum(cost_micros(view) for view in views) * len(self.layers) // 4 + 20
        return Work(plan.step, views, mine, spread, inward, self.replica.digest, micros)

    def forward(self, work: Work, inward: dict[str, Tensor] | None) -> Outward:
        self._layer.start(work.step)
        bundle: dict[str, Tensor] = {}
        results: tuple[Result, ...] = ()
        if work.spread.total:
            hidden = self._open(work, inward)
            rows = self._rows(work)
            for layer in self.layers:
                hidden = self._attend(layer, hidden, rows, work)
                hidden = self._widen(layer, hidden, work)
            if self.is_last:
                results = self._draw(hidden, work)
            else:
                bundle["hidden"] = to_tensor(hidden)[self._slice(work)].clone()
        elif not self.is_last:
            bundle["hidden"] = torch.zeros(0, 1, dtype=torch.float64)
        return Outward(bundle, results, work.digest, work.micros)

    def report(self, plan: StepPlan, outward: Outward) -> StepReport:
        return StepReport(
            plan.step, self.rank, outward.digest, outward.results, (), (), outward.micros
        )

    def _rows(self, work: Work) -> "StageRows":
        rows = StageRows(work.mine, self._own_from, work.spread.local(self.rank))
        for look in rows.looks:
            self.pool.writers[look.slots[look.start :]] = look.seq
        for look in rows.looks:
            self.pool.check(look)
        return rows

    def _slice(self, work: Work) -> slice:
        counts = work.spread.slices(self.rank)
        start = sum(counts[: self.place.attn_tp])
        return slice(start, start + counts[self.place.attn_tp])

    def _open(self, work: Work, inward: dict[str, Tensor] | None) -> Ints:
        """Hidden integers of this rank's rows: embedded, each token by one rank, or received."""
        attn_tp = self._layer.group("attn_tp")
        if inward is not None:
            counts = work.spread.slices(self.rank)
            return to_ints(attn_tp.all_gather(inward["hidden"], counts))
        tokens = [token for view in work.mine for token in view.rows.tokens]
        positions = [position for view in work.mine for position in view.positions()]
        local = work.spread.local(self.rank)
        tokens_T = np.array(tokens, dtype=np.uint64)[local]
        hidden = model.embed(tokens_T, np.array(positions, dtype=np.uint64)[local])
        hidden[tokens_T % np.uint64(attn_tp.size) != self.place.attn_tp] = 0
        return to_ints(attn_tp.all_reduce(to_tensor(hidden)[None]))

    def _attend(self, layer: int, hidden: Ints, rows: StageRows, work: Work) -> Ints:
        cached = model.cached(layer, hidden, self.heads)
        whole = self._whole(to_tensor(cached.T), work)  # [group rows, heads]
        self.pool.write(layer, rows.slots, whole.T)
        sums = np.empty((len(cached), len(hidden)), dtype=np.uint64)
        for look, places, within in rows.seen:
            sums[:, places] = self.pool.sums(layer, look)[:, within]
        said = model.read(layer, sums, self.heads).sum(0, dtype=np.uint64)
        total = self._layer.group("attn_tp").all_reduce(to_tensor(said)[None])
        return model.add(hidden, to_ints(total))

    def _whole(self, x_TK: Tensor, work: Work) -> Ints:
        """The rows of all cp ranks, in group order."""
        counts = work.spread.cp_counts(self.rank)
        gathered = self._layer.group("cp").all_gather(x_TK, counts)
        return to_ints(gathered, flat=False)[work.spread.in_group_order(self.rank)]

    def _widen(self, layer: int, hidden: Ints, work: Work) -> Ints:
        """The part in which every rank has every row of the stage."""
        spread, grid = work.spread, self.part.grid
        gathered = to_ints(
            self._layer.group("rows").all_gather(to_tensor(hidden), spread.rows_counts)
        )
        if self.part.shape.experts:
            total = self._experts.mixed(layer, gathered)
            start = sum(spread.rows_counts[: self.place.dp * grid.cp + self.place.cp])
            return model.add(hidden, total[start : start + len(hidden)])
        per_rank = model.UNITS // grid.tp
        first = (self.rank % grid.tp) * per_rank
        part = model.units(layer, gathered, slice(first, first + per_rank))
        scattered = self._layer.group("tp").reduce_scatter(to_tensor(part)[None], spread.tp_counts)
        total = self._layer.group("attn_tp").all_gather(scattered, spread.slices(self.rank))
        return model.add(hidden, to_ints(total))

    def _draw(self, hidden: Ints, work: Work) -> tuple[Result, ...]:
        whole = self._whole(to_tensor(hidden), work)[:, 0]
        asks = self._drawer.asks(work.mine)
        n_asked = len(asks.rows)
        if not n_asked:
            return self._drawer.results(work.mine, asks, np.zeros((0, 0), dtype=np.uint64))
        grid, vocab = self.part.grid, self.part.shape.vocab
        first = vocab * self.place.attn_tp // grid.attn_tp
        last = vocab * (self.place.attn_tp + 1) // grid.attn_tp
        scores = model.scores(whole[asks.rows], asks.keys, slice(first, last))
        counts = [
            vocab * (peer + 1) // grid.attn_tp - vocab * peer // grid.attn_tp
            for peer in range(grid.attn_tp)
        ]
        gathered = self._layer.group("attn_tp").all_gather(to_tensor(scores.T), counts)
        if not self.is_leader:
            return ()
        return self._drawer.results(work.mine, asks, to_ints(gathered, flat=False).T)
