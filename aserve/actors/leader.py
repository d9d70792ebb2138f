"""The leader's loop: events go to the planner, plans to the ranks, outputs to the clients.

While the ranks compute a step the leader turns the outputs of the step before into deltas. It
waits on events only, and does nothing while there is nothing to do. Ranks may come and go under
it: `run` serves one start of them, `reset` forgets what they had not answered.
"""

import time
from collections.abc import Callable, Iterable, Sequence

import trio

from aserve.actors.choice import Choice
from aserve.actors.metrics import Meters
from aserve.core.message import StepPlan, StepReport
from aserve.core.planner import Planner
from aserve.core.request import FinishReason, Output, Request
from aserve.errors import AserveError, RequestError
from aserve.planes.request import LeaderEnd


class Awaited:
    """A plan that not every rank has reported on yet."""

    __slots__ = ("micros_max", "missing", "plan", "sent_at")

    def __init__(self, plan: StepPlan, world: int) -> None:
        self.plan = plan
        self.missing = set(range(world))
        self.sent_at = time.monotonic()
        self.micros_max = 0


class Leader:
    """Owns the planner. Everything but `run` and the waits is synchronous."""

    def __init__(self, planner: Planner, *, world: int = 1, in_flight_max: int = 1) -> None:
        self.planner = planner
        self.meters = Meters(world)
        self.failure: str | None = None
        self.delivered: Callable[[], None] = lambda: None  # called behind a step's last delta
        self.awaited: dict[int, Awaited] = {}
        self._world = world
        self._in_flight_max = in_flight_max
        self._choices: dict[int, Choice] = {}
        self._outputs: tuple[Output, ...] = ()  # not yet made into deltas
        self._waiting: trio.CancelScope | None = None
        self._progress = trio.Event()

    def add(self, asked: Sequence[tuple[Request, Choice]]) -> None:
        """All choices of one client request, or none.

        Raises RequestError: the queue is full, or the request can never fit.
        """
        added: list[int] = []
        try:
            for request, _ in asked:
                self.planner.add(request)
                added.append(request.seq)
        except RequestError:
            for seq in added:
                self.planner.finish(seq, "abort")
            raise
        now = time.monotonic()
        for request, choice in asked:
            self._choices[request.seq] = choice
            choice.started_at = now
        self.meters.requests += 1
        self.meters.prompt_tokens += asked[0][1].prompt_len
        self.wake()

    def abort(self, seqs: Iterable[int]) -> bool:
        """End what still runs of `seqs`; False if nothing did. Pages go with the next plan."""
        return self._finish(seqs, "abort")

    def give_up(self, seqs: Iterable[int], why: str) -> bool:
        """End what still runs of `seqs` with an error, and go on with the others."""
        return self._finish(seqs, "error", why)

    def _finish(self, seqs: Iterable[int], reason: FinishReason, error: str | None = None) -> bool:
        choices = [self._choices[seq] for seq in seqs if seq in self._choices]
        for choice in choices:
            self.planner.finish(choice.seq, reason)
            self._end(choice, reason, error)
        if choices:
            self.wake()
        return bool(choices)

    def fail(self, message: str) -> None:
        """Nothing will be computed any more: every request ends with an error, none may come."""
        self.failure = self.failure or message
        for choice in list(self._choices.values()):
            self._end(choice, "error", message)
        self._announce()

    def close(self) -> None:
        """Nothing more will be computed: every request ends with "abort"."""
        for choice in list(self._choices.values()):
            self._end(choice, "abort")
        self._announce()

    @property
    def busy(self) -> bool:
        return bool(self._choices)

    def wake(self) -> None:
        """Something changed: the planner may have a plan now."""
        if self._waiting is not None:
            self._waiting.cancel()

    async def wait_progress(self) -> None:
        """Return when a step was reported or a choice ended since the call."""
        await self._progress.wait()

    async def wait_profiled(self) -> None:
        """Return when requests would be computed: not behind the planner's start-up profile.

        Raises AserveError if the ranks fail for good meanwhile.
        """
        while self.planner.profiling:
            if self.failure is not None:
                raise AserveError(self.failure)
            await self.wait_progress()

    def _announce(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    def in_flight(self) -> dict[int, int]:
        """The sequences that stand in steps not answered in full, and how many tokens each got."""
        rows = (
            rows
            for awaited in self.awaited.values()
            for batch in awaited.plan.batches
            for rows in batch.rows
        )
        return {
            row.seq: self._choices[row.seq].tokens_len for row in rows if row.seq in self._choices
        }

    def reset(self) -> None:
        """The ranks are gone, and what they had not answered with them; see `Planner.reset`."""
        self.awaited.clear()
        self.planner.reset()
        self._announce()

    async def run(self, plane: LeaderEnd) -> None:
        """Serve with one start of the ranks until they break, which raises.

        PlaneError: a rank died or ranks did not meet; Desync: a rank is not where it should be.
        """
        try:
            while True:
                while (plan := self.planner.plan()) is not None:
                    plane.send_nowait(plan)
                    self.meters.plan(plan)
                    self.awaited[plan.step] = Awaited(plan, self._world)
                    if len(self.awaited) == 1:
                        await self._let_rank_start()
                delivered = self._deliver()
                if len(self.awaited) >= self._in_flight_max:
                    self._report(await plane.reports.receive())
                elif self.awaited:
                    await self._wait_news(plane)
                elif not delivered:  # what was delivered may have given the planner news
                    self._announce()
                    await self._wait_news(plane)
        finally:
            self._deliver()  # the planner counts these tokens as given out

    async def _let_rank_start(self) -> None:
        """Only then are deltas made, beside the step instead of before it; where another step is
        being computed they are anyway.

        The rank stands in the next round of tasks, on either side of us: after two it has run.
        """
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def _wait_news(self, plane: LeaderEnd) -> None:
        """Until a report came (also a dead rank's last word, while nothing is asked) or `wake`."""
        report: StepReport | None = None
        with trio.CancelScope() as self._waiting:
            report = await plane.reports.receive()
        self._waiting = None
        if report is not None:
            self._report(report)

    def _report(self, report: StepReport) -> None:
        """Raises Desync if the report cannot follow from its plan."""
        outputs = self.planner.report(report)
        self._outputs += outputs
        awaited = self.awaited[report.step]
        awaited.missing.discard(report.rank)
        awaited.micros_max = max(awaited.micros_max, report.micros)
        self.meters.report(report)
        if not awaited.missing:
            del self.awaited[report.step]
            self.meters.step_s.observe(awaited.micros_max / 1e6)

    def _deliver(self) -> bool:
        """Turn outputs into deltas; False if there were none."""
        outputs, self._outputs = self._outputs, ()
        if not outputs:
            return False
        now = time.monotonic()
        gaps: dict[float, int] = {}  # between tokens; most who get one now got the last together
        for output in outputs:
            choice = self._choices.get(output.seq)
            if choice is None:
                continue  # aborted while its step was computed
            if output.tokens:
                gap = self._gap(choice, output, now)
                gaps[gap] = gaps.get(gap, 0) + 1
            if choice.push(output) is not None:
                self.planner.finish(output.seq, "stop")
            if choice.finish_reason is not None:
                self._settle(choice)
        self.delivered()
        for gap, times in gaps.items():
            if gap >= 0:
                self.meters.inter_token_s.observe(gap, times)
        self._announce()
        return True

    def _gap(self, choice: Choice, output: Output, now: float) -> float:
        """Seconds for each of its tokens since those before; -1: these are the first."""
        n_tokens, last_at = len(output.tokens), choice.last_at
        self.meters.generation_tokens += n_tokens
        choice.last_at = now
        if choice.first_at is not None:
            return (now - last_at) / n_tokens
        choice.first_at = now
        self.meters.ttft_s.observe(now - choice.started_at)
        self.meters.cached_tokens += output.cached_len
        return -1.0

    def _end(self, choice: Choice, reason: FinishReason, error: str | None = None) -> None:
        choice.end(reason, error=error)
        self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        del self._choices[choice.seq]
        assert choice.finish_reason is not None
        self.meters.finished[choice.finish_reason] += 1
        self.meters.e2e_s.observe(time.monotonic() - choice.started_at)
