"""Lies told on ranks and between them; see `faulty`."""

import dataclasses
from copy import copy
from typing import Any

import msgspec
import numpy as np
import torch

from aserve.core import replica
from aserve.core.layout import Grid
from aserve.core.message import AskState
from aserve.core.replica import Replica, RowsView
from aserve.planes.hidden import MemoryEnd
from aserve.planes.request import FollowerEnd
from aserve.tensor.tokens import Picked, Seat, Tokens
from aserve.testing import arithmetic
from aserve.testing.draws import Drawer, Walk
from aserve.testing.experts import ExpertRank
from aserve.testing.kv_pool import IntegerPool, Look
from aserve.testing.stage import LegibleStage
from aserve.testing.swap import Swap


def compaction_skipped(swap: Swap) -> None:
    swap.put(replica, "moved", lambda path, start: ([], []))


def compaction_backwards(swap: Swap) -> None:
    swap.wrap(replica, "moved", lambda right, path, start: right(path, start)[::-1])


def compaction_on_one_stage(swap: Swap) -> None:
    def apply(right: Any, stage: LegibleStage, plan: Any) -> Any:
        if stage.place.pp == 0:
            stage.pool = _Immovable(stage.pool)  # type: ignore[assignment]
        return right(stage, plan)

    swap.wrap(LegibleStage, "apply", apply)


class _Immovable:
    """A pool that moves nothing."""

    def __init__(self, pool: IntegerPool) -> None:
        self._pool = pool._pool if isinstance(pool, _Immovable) else pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def move(self, seq: int, slots_from: Any, slots_to: Any) -> None:
        self._pool.writers[list(slots_to)] = seq


def siblings_seen(swap: Swap) -> None:
    def init(right: Any, look: Look, view: RowsView, own_from: int) -> None:
        right(look, view, own_from)
        look.parents = ()

    swap.wrap(Look, "__init__", init)


def positions_by_row(swap: Swap) -> None:
    swap.put(RowsView, "positions", lambda view: list(range(view.start, view.kv_len)))


def stage_skips(swap: Swap) -> None:
    def forward(right: Any, stage: LegibleStage, work: Any, inward: Any) -> Any:
        layers = stage.layers
        if stage.place.pp == 1 and work.step % 3 == 1:
            stage.layers = layers[:0]
        try:
            return right(stage, work, inward)
        finally:
            stage.layers = layers

    swap.wrap(LegibleStage, "forward", forward)


def old_bundle(swap: Swap) -> None:
    before: dict[int, dict[str, torch.Tensor]] = {}

    async def receive(right: Any, end: MemoryEnd, step: int, shapes: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = await right(end, step, shapes)
        old = before.get(id(end))
        before[id(end)] = bundle
        if old is None or old["hidden"].shape != bundle["hidden"].shape:
            return bundle
        return old

    swap.wrap(MemoryEnd, "receive", receive)


def rows_miscounted(swap: Swap) -> None:
    def init(right: Any, tokens: Tokens, seat: Seat, lengths: Any) -> None:
        right(tokens, seat, lengths)
        if seat.rank == 1:
            tokens.counts = tokens.counts[::-1]

    swap.wrap(Tokens, "__init__", init)


def cp_order_lost(swap: Swap) -> None:
    def cut(right: Any, tokens: Tokens, lengths: Any, totals: Any) -> None:
        right(tokens, lengths, totals)
        tokens.group_order = np.arange(len(tokens.group_order))

    swap.wrap(Tokens, "_cut", cut)


def pick_order_lost(swap: Swap) -> None:
    def pick(right: Any, tokens: Tokens, x_TH: Any, rows: Any) -> Picked:
        picked = right(tokens, x_TH, rows)
        return Picked(picked.x_WH, picked.counts, None)

    swap.wrap(Tokens, "pick", pick)


def wrong_group(swap: Swap) -> None:
    def init(right: Any, seat: Seat, grid: Grid, rank: int, layer: Any) -> None:
        right(seat, grid, rank, layer)
        seat.attn_tp = seat.rows

    swap.wrap(Seat, "__init__", init)


def one_in_another_group(swap: Swap) -> None:
    def init(right: Any, seat: Seat, grid: Grid, rank: int, layer: Any) -> None:
        right(seat, grid, rank, layer)
        if rank == 0:
            seat.attn_tp = seat.rows

    swap.wrap(Seat, "__init__", init)


def experts_astray(swap: Swap) -> None:
    def exchanged(right: Any, rank: ExpertRank, ep: Any, sent: list[int]) -> list[int]:
        found: list[int] = right(rank, ep, sent)
        return found

    def expert(right: Any, layer: int, hidden: Any, experts: Any, part: Any) -> Any:
        return right(layer, hidden[::-1], experts[::-1], part)

    swap.wrap(ExpertRank, "_exchanged", exchanged)
    swap.wrap(arithmetic, "expert", expert)


def stale_table(swap: Swap) -> None:
    def forward(right: Any, stage: LegibleStage, work: Any, inward: Any) -> Any:
        known: dict[int, list[int]] = stage.__dict__.setdefault("stale", {})
        views = []
        for view in work.mine:
            pages = known.setdefault(view.rows.seq, [])
            pages += view.state.pages[len(pages) :]
            state = copy(view.state)
            state.pages = pages
            views.append(RowsView(state, view.rows, view.group, view.page_size))
        return right(stage, dataclasses.replace(work, mine=tuple(views)), inward)

    swap.wrap(LegibleStage, "forward", forward)


def noise_by_step(swap: Swap) -> None:
    n_keys = 0

    def score_key(right: Any, sampling: Any, position: int) -> int:
        nonlocal n_keys
        n_keys += 1
        return int(right(sampling, position + n_keys % 7))

    swap.wrap(arithmetic, "score_key", score_key)


def rule_by_root(swap: Swap) -> None:
    def step(right: Any, walk: Walk, token: int) -> None:
        right(walk, token)
        if len(walk.generated) > 1 and walk._rows.parents:
            walk.generated.pop()

    swap.wrap(Walk, "step", step)


def digest_not_folded(swap: Swap) -> None:
    def apply(right: Any, stage: LegibleStage, plan: Any) -> Any:
        before = stage.replica.digest
        work = right(stage, plan)
        if stage.rank == 0 and plan.step == 3:
            stage.replica.digest = before
        return work

    swap.wrap(LegibleStage, "apply", apply)


def drops_ignored(swap: Swap) -> None:
    def apply(right: Any, copy: Replica, plan: Any) -> Any:
        if copy.sequences and plan.drops:
            plan = msgspec.structs.replace(plan, drops=())
        return right(copy, plan)

    swap.wrap(Replica, "apply", apply)


def plan_lost(swap: Swap) -> None:
    def take(right: Any, end: FollowerEnd, message: Any) -> None:
        if end.rank or getattr(message, "step", 0) != 4:
            right(end, message)

    swap.wrap(FollowerEnd, "take", take)


def dropped_kept(swap: Swap) -> None:
    def apply(right: Any, stage: LegibleStage, plan: Any) -> Any:
        kept = {seq: stage.replica.sequences[seq] for seq in plan.drops}
        work = right(stage, plan)
        stage.replica.sequences |= kept
        return work

    swap.wrap(LegibleStage, "apply", apply)


def question_lost(swap: Swap) -> None:
    def take(right: Any, end: FollowerEnd, message: Any) -> None:
        if end.rank or not isinstance(message, AskState):
            right(end, message)

    swap.wrap(FollowerEnd, "take", take)


def larger_drafts(swap: Swap) -> None:
    """A drafter makes drafts of the size that it made before."""

    def drafted(right: Any, drawer: Drawer, view: Any, tokens: Any, drafting: Any) -> Any:
        asked = drawer.__dict__.setdefault("asked", drafting)
        return right(drawer, view, tokens, asked)

    swap.wrap(Drawer, "_drafted", drafted)
