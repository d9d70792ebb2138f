"""The leader's loop: events go to the planner, plans to the ranks, outputs to the clients.

While the ranks compute a step the leader turns the outputs of the step before into deltas. It
waits on events only, and does nothing while there is nothing to do.
"""

import time
from collections.abc import Iterable, Sequence

import trio

from aserve.actors.choice import Choice
from aserve.actors.metrics import EngineStatistics, Meters
from aserve.core.message import StepReport
from aserve.core.planner import Planner
from aserve.core.request import FinishReason, Output, Request
from aserve.errors import RequestError
from aserve.planes.request import LeaderEnd


class Leader:
    """Owns the planner. Everything but `run` and the waits is synchronous."""

    def __init__(self, planner: Planner, plane: LeaderEnd) -> None:
        self.planner = planner
        self.meters = Meters()
        self.failure: str | None = None
        self._plane = plane
        self._choices: dict[int, Choice] = {}
        self._in_flight = 0
        self._wake: trio.Event | None = None
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
        choices = [self._choices[seq] for seq in seqs if seq in self._choices]
        for choice in choices:
            self.planner.finish(choice.seq, "abort")
            self._end(choice, "abort")
        if choices:
            self.wake()
        return bool(choices)

    def fail(self, message: str) -> None:
        """A rank or this loop is dead: every request ends with an error, and none may come."""
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
        if self._wake is not None:
            self._wake.set()

    async def wait_progress(self) -> None:
        """Return when a step was reported or a choice ended since the call."""
        await self._progress.wait()

    def _announce(self) -> None:
        self._progress.set()
        self._progress = trio.Event()

    async def run(self) -> None:
        outputs: tuple[Output, ...] = ()
        while True:
            while (plan := self.planner.plan()) is not None:
                self._plane.send_nowait(plan)
                self._in_flight += 1
                await self._let_rank_start()
            delivered, outputs = self._deliver(outputs), ()
            if self._in_flight:
                outputs = self._reported(await self._plane.reports.receive())
            elif not delivered:  # what was delivered may have given the planner news
                self._announce()
                await self._wait_wake()

    async def _let_rank_start(self) -> None:
        """Only then are deltas made, beside the step instead of before it.

        The rank stands in the next round of tasks, on either side of us: after two it has run.
        """
        for _ in range(2):
            await trio.lowlevel.checkpoint()

    async def _wait_wake(self) -> None:
        self._wake = trio.Event()
        await self._wake.wait()
        self._wake = None

    def _reported(self, report: StepReport) -> tuple[Output, ...]:
        self._in_flight -= 1
        self.meters.step_s.observe(report.micros / 1e6)
        return self.planner.report(report)

    def _deliver(self, outputs: tuple[Output, ...]) -> bool:
        """Turn outputs into deltas; False if there were none."""
        if not outputs:
            return False
        now = time.monotonic()
        for output in outputs:
            choice = self._choices.get(output.seq)
            if choice is None:
                continue  # aborted while its step was computed
            self._measure(choice, output, now)
            if choice.push(output) is not None:
                self.planner.finish(output.seq, "stop")
            if choice.ended:
                self._settle(choice)
        self._announce()
        return True

    def _measure(self, choice: Choice, output: Output, now: float) -> None:
        if not output.tokens:
            return
        meters = self.meters
        if choice.first_at is None:
            choice.first_at = now
            meters.ttft_s.observe(now - choice.started_at)
            meters.cached_tokens += output.cached_len
        else:
            meters.inter_token_s.observe((now - choice.last_at) / len(output.tokens))
        choice.last_at = now
        meters.generation_tokens += len(output.tokens)

    def _end(self, choice: Choice, reason: FinishReason, error: str | None = None) -> None:
        choice.end(reason, error=error)
        self._settle(choice)

    def _settle(self, choice: Choice) -> None:
        del self._choices[choice.seq]
        assert choice.finish_reason is not None
        self.meters.finished[choice.finish_reason] += 1
        self.meters.e2e_s.observe(time.monotonic() - choice.started_at)

    def statistics(self, *, ready: bool) -> EngineStatistics:
        meters = self.meters
        return EngineStatistics(
            ready=ready,
            failure=self.failure,
            planner=self.planner.statistics(),
            requests=meters.requests,
            finished=dict(meters.finished),
            prompt_tokens=meters.prompt_tokens,
            cached_tokens=meters.cached_tokens,
            generation_tokens=meters.generation_tokens,
            ttft_s=meters.ttft_s.data(),
            inter_token_s=meters.inter_token_s.data(),
            e2e_s=meters.e2e_s.data(),
            step_s=meters.step_s.data(),
        )
