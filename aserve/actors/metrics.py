"""What the engine counts: plain numbers and histograms, read by whoever renders them."""

from bisect import bisect_left
from collections import Counter

import msgspec

from aserve.core.message import NO_DRAFTING, Drafting, StepPlan, StepReport
from aserve.core.planner import PlannerStatistics

LATENCY_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)


class HistogramData(msgspec.Struct, frozen=True):
    """`counts[i]` observations were at most `bounds[i]` (and above the bound before); one more
    count for those above every bound. In seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def data(self) -> HistogramData:
        return HistogramData(self._bounds, tuple(self._counts), self._sum)


class RankStatistics(msgspec.Struct, frozen=True):
    """`step` is the last one reported, -1 for none; seconds are over all starts of the rank."""

    rank: int
    step: int
    busy_s: float  # in forward
    waited_s: float  # for plans and for the stage before


class EngineStatistics(msgspec.Struct, frozen=True):
    """One moment of the engine. Latencies are per choice, as the leader saw them."""

    ready: bool
    state: str  # of the grid of ranks; see aserve.actors.supervision
    failure: str | None
    restarts: int
    ranks: tuple["RankStatistics", ...]
    planner: PlannerStatistics
    requests: int
    finished: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    ttft_s: HistogramData
    inter_token_s: HistogramData
    e2e_s: HistogramData
    step_s: HistogramData
    drafting: Drafting  # of the last plan: how large the drafts are that it asks for


class Meters:
    """The running counts behind EngineStatistics."""

    def __init__(self, world: int) -> None:
        self.requests = 0
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.ttft_s = Histogram()
        self.inter_token_s = Histogram()
        self.e2e_s = Histogram()
        self.step_s = Histogram()
        self.drafting = NO_DRAFTING
        self._steps = [-1] * world
        self._busy_micros = [0] * world
        self._waited_micros = [0] * world

    def plan(self, plan: StepPlan) -> None:
        if any(rows.sample for batch in plan.batches for rows in batch.rows):
            self.drafting = plan.drafting  # chunks of prompts end with no drafts, whatever is asked

    def report(self, report: StepReport) -> None:
        self._steps[report.rank] = report.step
        self._busy_micros[report.rank] += report.micros
        self._waited_micros[report.rank] += report.waited_micros

    def ranks(self) -> tuple[RankStatistics, ...]:
        numbers = zip(self._steps, self._busy_micros, self._waited_micros, strict=True)
        return tuple(
            RankStatistics(rank, step, busy / 1e6, waited / 1e6)
            for rank, (step, busy, waited) in enumerate(numbers)
        )

    def statistics(
        self,
        planner: PlannerStatistics,
        *,
        ready: bool,
        state: str,
        failure: str | None,
        restarts: int,
    ) -> EngineStatistics:
        return EngineStatistics(
            ready=ready,
            state=state,
            failure=failure,
            restarts=restarts,
            ranks=self.ranks(),
            planner=planner,
            requests=self.requests,
            finished=dict(self.finished),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.generation_tokens,
            ttft_s=self.ttft_s.data(),
            inter_token_s=self.inter_token_s.data(),
            e2e_s=self.e2e_s.data(),
            step_s=self.step_s.data(),
            drafting=self.drafting,
        )
