"""What a layout's plans weigh, and what leader and ranks pay for them beside the model."""

import statistics
import time
from collections import deque

import msgspec

from aserve.bench.plan import PAGE_SIZE, PROMPT_LEN, drawn
from aserve.core.codec import decode_plan, decode_report, encode
from aserve.core.config import Layout, Schedule
from aserve.core.layout import Grid
from aserve.core.message import StepPlan, StepReport
from aserve.core.planner import CacheSpec, Planner
from aserve.core.replica import Replica, RowsView
from aserve.core.request import Request, Sampling


class PlanCost(msgspec.Struct, frozen=True):
    """Medians of decode steps. `leader_us` is planning, encoding and all ranks' reports of a step,
    `rank_us` one rank's decoding, bookkeeping and report."""

    running: int
    plan_bytes: float
    leader_us: float
    rank_us: float


class Loop:
    """A planner, and the bookkeeping of one rank standing for all."""

    def __init__(self, layout: Layout, running: int, steps: int) -> None:
        self.grid = Grid(layout)
        pages = -(-(PROMPT_LEN + steps + 2) // PAGE_SIZE) * running
        schedule = Schedule(step_tokens=4096 * layout.dp, running_max=2 * running)
        cache = CacheSpec(PAGE_SIZE, pages)
        self.planner = Planner(schedule, cache, context_len=1 << 20, layout=layout)
        self.replica = Replica(PAGE_SIZE)
        self.in_flight: deque[tuple[StepPlan, tuple[RowsView, ...], int]] = deque()
        self.found: list[tuple[int, int, int]] = []  # bytes, leader's and rank's nanoseconds
        for seq in range(running):
            prompt = tuple(range(seq, seq + PROMPT_LEN))
            self.planner.add(Request(seq, prompt, steps, Sampling(stop_ids=(0, 2))))

    def step(self) -> bool:
        """Plan what can be planned, report the oldest; False when nothing is left."""
        clock = time.perf_counter_ns
        while True:
            begin = clock()
            plan = self.planner.plan()
            if plan is None:
                break
            data = encode(plan)
            planned = clock()
            views = self.replica.apply(decode_plan(data)).views
            applied = clock()
            self.in_flight.append((plan, views, self.replica.digest))
            self.found.append((len(data), planned - begin, applied - planned))
        if not self.in_flight:
            return False
        plan, views, digest = self.in_flight.popleft()
        at = len(self.found) - len(self.in_flight) - 1
        told = [encode(report) for report in self._reports(plan, views, digest)]
        begin = clock()
        for data in told:
            self.planner.report(decode_report(data))
        n_bytes, leader_ns, rank_ns = self.found[at]
        self.found[at] = n_bytes, leader_ns + clock() - begin, rank_ns
        return True

    def _reports(
        self, plan: StepPlan, views: tuple[RowsView, ...], digest: int
    ) -> list[StepReport]:
        group_of = {self.grid.leader(group): group for group in range(self.grid.dp)}
        return [
            StepReport(
                plan.step,
                rank,
                digest,
                drawn([view for view in views if view.group == group_of.get(rank, -1)]),
                (),
                (),
                0,
            )
            for rank in range(self.grid.world)
        ]


def plan_cost(layout: Layout, running: int = 32, steps: int = 200) -> PlanCost:
    """`running` sequences in all, decoding."""
    loop = Loop(layout, running, steps)
    while loop.step():
        continue
    middle = loop.found[len(loop.found) // 4 : -len(loop.found) // 4]  # no joins, no leaves
    n_bytes, leader_ns, rank_ns = (
        statistics.median(column) for column in zip(*middle, strict=True)
    )
    return PlanCost(running, n_bytes, leader_ns / 1e3, rank_ns / 1e3)
