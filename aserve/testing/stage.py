"""One rank of a legible model: integers in a real page pool, sums by the layer plane's collectives.

Takes the place of aserve.runner.runner.Runner in any layout. Every rank computes its own share
only, so what it leaves out, doubles, sends astray or reads from the wrong page changes the text.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.core.layout import Grid
from aserve.core.message import LAGGING, Drafting, Result, StepPlan, StepReport
from aserve.core.planner import CacheSpec
from aserve.core.replica import KvMove, Replica, RowsView
from aserve.tensor.collective import LayerPlane
from aserve.tensor.tokens import Rows, Seat, Tokens, even_shares
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import Ints, Shape, to_ints, to_tensor
from aserve.testing.drafts import Guess
from aserve.testing.draws import Drawer
from aserve.testing.experts import ExpertRank
from aserve.testing.kv_pool import IntegerPool, Look
from aserve.testing.pair_pool import PairPool


@dataclasses.dataclass(frozen=True)
class Part:
    """What all ranks of a legible deployment have in common."""

    grid: Grid
    shape: Shape
    cache: CacheSpec
    bigrams: bool = False  # the drafter keeps KV of pairs of tokens


@dataclasses.dataclass(frozen=True)
class Work:
    """One plan's rows; `inward` is what the stage before sends: name -> (shape, dtype).

    All that `forward` changes comes with it: plans are applied while earlier ones are computed.
    """

    step: int
    plan: StepPlan
    moves: tuple[KvMove, ...]
    views: tuple[RowsView, ...]
    mine: tuple[RowsView, ...]  # of this rank's attention group
    tokens: Tokens
    inward: dict[str, tuple[tuple[int, ...], torch.dtype]]
    digest: int
    micros: int
    draft_micros: int  # of these


@dataclasses.dataclass(frozen=True)
class Outward:
    bundle: dict[str, Tensor]
    results: tuple[Result, ...]
    digest: int
    micros: int
    draft_micros: int


class StageRows:
    """A rank's view of its group's rows: all slots in group order, and what its own rows see."""

    def __init__(self, views: Sequence[RowsView], own_from: dict[int, int], tokens: Tokens) -> None:
        is_cut = tokens.seat.grid.cp > 1
        self.local: Rows = tokens.local_order if is_cut else np.arange(tokens.n_local)
        local = self.local
        self.looks = [Look(view, own_from[view.rows.seq]) for view in views]
        starts = np.cumsum([0, *(look.n_rows for look in self.looks)])
        self.slots: Rows = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(look.slots[look.start :] for look in self.looks)]
        )
        if is_cut:  # as `whole_sequence` gives them
            self.slots = self.slots[tokens.group_order]
        # Of each sequence with rows here: where they are among them, and which of its rows.
        self.seen: list[tuple[Look, Rows, Rows]] = []
        for look, first in zip(self.looks, starts[:-1], strict=True):
            places = np.flatnonzero((local >= first) & (local < first + look.n_rows))
            if len(places):
                self.seen.append((look, places, local[places] - first))


def cost_micros(view: RowsView) -> int:
    """Virtual time that a sequence's rows take: more the longer what they look back on."""
    return 10 * view.n_rows + view.n_rows * view.kv_len // 8


def draft_cost_micros(views: Sequence[RowsView], drafting: Drafting) -> int:
    return sum([view.rows.sample for view in views]) * 2 * drafting.tokens


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
        self._seat = Seat(grid, rank, layer)
        self._own_from: dict[int, int] = {}  # where the prefix that others wrote ends
        self._experts = ExpertRank(self._seat)
        self._drawer = Drawer(part.shape.vocab, guess)
        self._pairs: PairPool | None = None
        if part.bigrams and self.is_last and self._seat.is_leader:
            self._pairs = PairPool(part.cache)

    def apply(self, plan: StepPlan) -> Work:
        """Bookkeeping; asserts that the plan follows from those before it."""
        views, moves = self.replica.apply(plan)
        counts_G: list[list[int]] = [[] for _ in plan.batches]
        for view in views:
            counts_G[view.group].append(view.n_rows)
        tokens = Tokens(self._seat, counts_G)
        mine = tuple(view for view in views if view.group == self.place.dp)
        inward = {}
        if self.place.pp:
            count = tokens.slice_counts[self.place.attn_tp]
            inward["hidden"] = ((count, 1), torch.float64)
        micros = sum(cost_micros(view) for view in views) * len(self.layers) // 4 + 20
        draft_micros = 0
        if self.is_last and self._seat.is_leader:
            draft_micros = draft_cost_micros(mine, plan.drafting)
        digest, micros = self.replica.digest, micros + draft_micros
        return Work(
            plan.step, plan, moves, views, mine, tokens, inward, digest, micros, draft_micros
        )

    def forward(self, work: Work, inward: Mapping[str, Tensor] | None) -> Outward:
        self._seat.layer.start(work.step)
        self._prepare(work)
        rows = self._rows(work)
        hidden = self._open(work, inward, rows)
        for layer in self.layers:
            hidden = self._attend(layer, hidden, rows, work.tokens)
            hidden = self._widen(layer, hidden, work.tokens)
        bundle: dict[str, Tensor] = {}
        results: tuple[Result, ...] = ()
        if self.is_last:
            results = self._draw(hidden, work)
        else:
            bundle["hidden"] = work.tokens.slice(to_tensor(hidden)).clone()
        return Outward(bundle, results, work.digest, work.micros, work.draft_micros)

    def report(self, plan: StepPlan, outward: Outward) -> StepReport:
        return StepReport(
            plan.step,
            self.rank,
            outward.digest,
            outward.results,
            (),
            (),
            outward.micros,
            draft_micros=outward.draft_micros,
        )

    def _prepare(self, work: Work) -> None:
        for move in work.moves:
            if move.group == self.place.dp:
                self.pool.move(move.seq, move.slots_from, move.slots_to)
        for seq in work.plan.drops:
            del self._own_from[seq]
            self._drawer.drop(seq)
        for admit in work.plan.admits:
            self._own_from[admit.seq] = admit.kv_len

    def _rows(self, work: Work) -> StageRows:
        rows = StageRows(work.mine, self._own_from, work.tokens)
        for look in rows.looks:
            self.pool.writers[look.slots[look.start :]] = look.seq
        for look in rows.looks:
            self.pool.check(look)
        return rows

    def _open(self, work: Work, inward: Mapping[str, Tensor] | None, rows: StageRows) -> Ints:
        """Hidden integers of this rank's rows: embedded, each token by one rank, or received."""
        if inward is not None:
            return to_ints(work.tokens.join(inward["hidden"]))
        drawn = self._drawn(work)
        tokens = [
            drawn[view.rows.seq] if token == LAGGING else token
            for view in work.mine
            for token in view.rows.tokens
        ]
        positions = [position for view in work.mine for position in view.positions()]
        tokens_T = np.array(tokens, dtype=np.uint64)[rows.local]
        hidden = model.embed(tokens_T, np.array(positions, dtype=np.uint64)[rows.local])
        attn_tp = self._seat.attn_tp
        hidden[tokens_T % np.uint64(attn_tp.size) != attn_tp.rank] = 0
        return to_ints(attn_tp.all_reduce(to_tensor(hidden)[None]))

    def _drawn(self, work: Work) -> dict[int, int]:
        """The tokens of all rows that lag, told to the stage by those who drew them."""
        seqs: list[list[int]] = [[] for _ in range(self.part.grid.dp)]
        for view in work.views:
            if view.rows.is_lagging:
                seqs[view.group].append(view.rows.seq)
        if not any(seqs):
            return {}
        counts = [0] * self.part.grid.tp
        for group, some in enumerate(seqs):
            counts[self.part.grid.leader(group)] = len(some)
        own = seqs[self.place.dp] if self._seat.is_leader else []
        mine = torch.tensor([self._drawer.last(seq) for seq in own], dtype=torch.int64)
        told = self._seat.tp.all_gather(mine, counts).tolist()
        return dict(zip([seq for some in seqs for seq in some], told, strict=True))

    def _attend(self, layer: int, hidden: Ints, rows: StageRows, tokens: Tokens) -> Ints:
        cached_TGD = to_tensor(model.cached(layer, hidden, self.heads).T)[:, :, None]
        half = cached_TGD.shape[1] // 2  # as if they were keys and values
        whole = torch.cat(tokens.whole_sequence(cached_TGD[:, :half], cached_TGD[:, half:]), dim=1)
        self.pool.write(layer, rows.slots, to_ints(whole[:, :, 0], flat=False).T)
        sums = np.empty((self.heads.stop - self.heads.start, len(hidden)), dtype=np.uint64)
        for look, places, within in rows.seen:
            sums[:, places] = self.pool.sums(layer, look)[:, within]
        said = model.read(layer, sums, self.heads).sum(0, dtype=np.uint64)
        return model.add(hidden, to_ints(self._seat.attn_tp.all_reduce(to_tensor(said)[None])))

    def _widen(self, layer: int, hidden: Ints, tokens: Tokens) -> Ints:
        """The part in which every rank has every row of the stage."""
        wide = to_ints(tokens.to_global(to_tensor(hidden)))
        if self.part.shape.experts:
            return model.add(hidden, self._experts.mixed(layer, wide)[tokens.local])
        per_rank = model.UNITS // self.part.grid.tp
        first = self._seat.inside * per_rank
        part = model.units(layer, wide, slice(first, first + per_rank))
        return model.add(hidden, to_ints(tokens.to_local(to_tensor(part)[None])))

    def _draw(self, hidden: Ints, work: Work) -> tuple[Result, ...]:
        """Scores of this group's rows, an attn_tp rank's share of the vocabulary each."""
        asks = self._drawer.asks(work.views)
        mine = self._drawer.asks(work.mine)
        scores_VR = torch.zeros(self.part.shape.vocab, 0, dtype=torch.float64)
        if asks.rows:
            picked = work.tokens.pick(to_tensor(hidden), asks.rows)
            start = sum(picked.counts[: self.place.dp])
            rows_RH = picked.x_WH[start : start + picked.counts[self.place.dp]]
            if picked.back is not None:
                rows_RH = rows_RH[picked.back]
            if mine.rows:
                scores_VR = self._scores(to_ints(rows_RH), mine.keys)
        if not self._seat.is_leader:
            return ()
        scores_RV = to_ints(scores_VR, flat=False).T
        results = self._drawer.results(work.mine, mine, scores_RV, work.plan.drafting)
        if self._pairs is not None:
            for view, result in zip(work.mine, results, strict=True):
                self._pairs.keep(view, result, self._drawer.text(view))
        return results

    def _scores(self, hidden_R: Ints, keys: Ints) -> Tensor:
        attn_tp = self._seat.attn_tp
        counts = even_shares(self.part.shape.vocab, attn_tp.size)
        first = sum(counts[: attn_tp.rank])
        scores = model.scores(hidden_R, keys, slice(first, first + counts[attn_tp.rank]))
        return attn_tp.all_gather(to_tensor(scores.T), counts)
