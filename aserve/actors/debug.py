"""What every rank, step, queue and page is at, asked while it happens: also while a rank hangs."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from aserve.actors.leader import Leader
from aserve.actors.placement import live_of
from aserve.actors.supervisor import Supervisor
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.core.message import RankState


class RankLine(msgspec.Struct, frozen=True):
    """One rank. What only it can say is empty where it did not answer."""

    rank: int
    place: str
    answered: bool
    reported_step: int  # -1: none yet
    step: int  # the last it took up, as it says
    digest: str
    doing: str
    last_call: str
    sequences: int
    waited_ms: float


class StepLine(msgspec.Struct, frozen=True):
    """A step that some ranks have not reported yet."""

    step: int
    microbatch: int
    rows: tuple[int, ...]  # of each attention group
    missing: tuple[int, ...]
    age_s: float


class DebugState(msgspec.Struct, frozen=True):
    """One moment of an engine; `planner` is its own account of queues, pages and digest."""

    state: str
    failure: str | None
    last_break: str | None
    restarts: int
    layout: Mapping[str, Any]
    live: str
    ranks: tuple[RankLine, ...]
    silent: tuple[int, ...]  # did not answer in time
    steps: tuple[StepLine, ...]
    spec: Mapping[str, Any]  # the method, and the drafts that the last plan asks for
    planner: Any


async def debug_state(supervisor: Supervisor, config: Config, limit_s: float) -> DebugState:
    """Waits at most `limit_s` for the ranks; those that do not answer are named."""
    told: dict[int, RankState] = {}
    if supervisor.ranks is not None:
        answers = await supervisor.ranks.plane.ask_states(limit_s)
        told = {state.rank: state for state in answers}
    leader, grid = supervisor.leader, Grid(config.layout)
    reported = [statistics.step for statistics in leader.meters.ranks()]
    lines = tuple(_rank(rank, grid, reported[rank], told.get(rank)) for rank in range(grid.world))
    return DebugState(
        state=supervisor.state,
        failure=leader.failure,
        last_break=supervisor.reason,
        restarts=supervisor.restarts,
        layout=msgspec.to_builtins(config.layout),
        live=live_of(config),
        ranks=lines,
        silent=tuple(line.rank for line in lines if not line.answered),
        steps=_steps(leader),
        spec=_spec(leader, config),
        planner=leader.planner.state(),
    )


def _spec(leader: Leader, config: Config) -> Mapping[str, Any]:
    depth, topk, tokens = msgspec.structs.astuple(leader.meters.drafting)
    return {"method": config.spec.method, "depth": depth, "topk": topk, "tokens": tokens}


def _rank(rank: int, grid: Grid, reported: int, told: RankState | None) -> RankLine:
    place = grid.place(rank)
    sizes = {"pp": grid.pp, "dp": grid.dp, "cp": grid.cp, "attn_tp": grid.attn_tp}
    where = " ".join(f"{axis} {getattr(place, axis)}" for axis, size in sizes.items() if size > 1)
    return RankLine(
        rank=rank,
        place=where or "the only one",
        answered=told is not None,
        reported_step=reported,
        step=told.step if told else -1,
        digest=f"{told.digest:08x}" if told else "",
        doing=told.doing if told else "",
        last_call=told.last_call if told else "",
        sequences=told.n_sequences if told else 0,
        waited_ms=told.waited_micros / 1e3 if told else 0.0,
    )


def _steps(leader: Leader) -> tuple[StepLine, ...]:
    now = time.monotonic()
    return tuple(
        StepLine(
            step=step,
            microbatch=awaited.plan.microbatch,
            rows=tuple(
                sum(len(rows.tokens) for rows in batch.rows) for batch in awaited.plan.batches
            ),
            missing=tuple(sorted(awaited.missing)),
            age_s=round(now - awaited.sent_at, 3),
        )
        for step, awaited in leader.awaited.items()
    )
