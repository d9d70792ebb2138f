"""Planner and ranks in a pure loop over a legible model: its KV is the tokens themselves.

The model writes each row's token to the row's slot and draws a hash of all it reads back through
the page table. A fault in paging, caching or order thus changes the text; `oracle` knows the text
and has never heard of pages.
"""

from collections import deque
from collections.abc import Callable, Iterable
from zlib import crc32

from aserve.core import pages
from aserve.core.codec import decode_plan, decode_report, encode_plan, encode_report
from aserve.core.config import Schedule
from aserve.core.message import (
    Result,
    Sampling,
    StepPlan,
    StepReport,
    TokenLogprob,
)
from aserve.core.planner import CacheSpec, Planner
from aserve.core.replica import Replica, RowsView
from aserve.core.request import Output, Request
from aserve.core.sequence import Sequence

VOCAB = 40
EMPTY = -1


def draw(seed: int, tokens: Iterable[int]) -> int:
    return crc32(repr((seed, *tokens)).encode()) % VOCAB


def oracle(request: Request) -> list[int]:
    """What a request generates."""
    tokens = list(request.tokens)
    made: list[int] = []
    while len(made) < request.max_tokens:
        token = draw(request.sampling.seed, tokens + made)
        made.append(token)
        is_stop = token in request.sampling.stop_ids
        if is_stop and len(made) > request.sampling.min_tokens:
            break
    return made


class Deployment:
    """`pump` goes on until nothing is left to do; `plan_one` and `report_one` go step by step."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        pages_total: int = 16,
        groups: int = 1,
        in_flight_max: int = 1,
        context_len: int = 1000,
        **schedule: int | bool,
    ) -> None:
        self.page_size = page_size
        self.schedule = Schedule(**{"step_tokens": 16 * groups, "running_max": 8, **schedule})
        cache = CacheSpec(page_size, pages_total)
        self.planner = Planner(
            self.schedule,
            cache,
            context_len=context_len,
            groups=groups,
            in_flight_max=in_flight_max,
        )
        self.replica = Replica(page_size)
        self.kv = [[EMPTY] * (pages_total * page_size) for _ in range(groups)]
        self.requests: dict[int, Request] = {}
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}
        self.finished_from_above: dict[int, str] = {}
        self.outputs: list[Output] = []
        self.plans: list[StepPlan] = []
        self.reports: deque[StepReport] = deque()
        self.fault: Callable[[StepPlan], StepPlan] = lambda plan: plan

    def add(self, request: Request) -> None:
        self.planner.add(request)
        self.requests[request.seq] = request
        self.texts[request.seq] = []

    def ask(
        self,
        seq: int,
        tokens: Iterable[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        **sampling: object,
    ) -> None:
        sampled = Sampling(**{"seed": 7, **sampling})
        self.add(Request(seq, tuple(tokens), max_tokens, sampled, priority, salt))

    def finish(self, seq: int, reason: str = "abort") -> Output | None:
        output = self.planner.finish(seq, reason)
        if output is not None:
            self._take(output)
            self.finished_from_above[seq] = reason
        self.planner.audit()
        return output

    def plan_one(self) -> StepPlan | None:
        """One plan, checked, computed at once; its report waits in `reports`."""
        queue = list(self.planner._composer.queue)
        n_retractions = self.planner.statistics().retractions
        plan = self.planner.plan()
        self.planner.audit()
        if plan is None:
            return None
        if self.planner.statistics().retractions == n_retractions:  # else the queue has changed
            self._check_order(plan, queue)
        self._check_budget(plan)
        self.plans.append(plan)
        views = self.replica.apply(decode_plan(encode_plan(self.fault(plan)))).views
        for view in views:
            self._write(view)
        results = tuple(self._result(view) for view in views)
        report = StepReport(plan.step, 0, self.replica.digest, results, (), (), 0)
        self.reports.append(decode_report(encode_report(report)))
        return plan

    def report_one(self) -> tuple[Output, ...]:
        outputs = self.planner.report(self.reports.popleft())
        self.planner.audit()
        for output in outputs:
            self._take(output)
        return outputs

    def step(self) -> StepPlan | None:
        """Plan, compute, report."""
        plan = self.plan_one()
        if plan is not None:
            self.report_one()
        return plan

    def pump(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            while self.plan_one() is not None:
                pass
            if not self.reports:
                return
            self.report_one()
        raise AssertionError(f"not idle after {steps_max} steps")

    def check_texts(self) -> None:
        """Every request has ended, with the text the oracle knows (a part if ended from above)."""
        for seq, request in self.requests.items():
            text, expected = self.texts[seq], oracle(request)
            assert seq in self.ends, seq
            if seq in self.finished_from_above:
                assert text == expected[: len(text)], seq
            else:
                assert text == expected, seq

    def check_idle(self) -> None:
        """Nothing is held: every page is free or cached, and a flush frees them all."""
        statistics = self.planner.statistics()
        assert (statistics.running, statistics.waiting, statistics.kv_pages_used) == (0, 0, 0)
        assert self.planner.flush_cache()
        statistics = self.planner.statistics()
        assert statistics.kv_pages_free == statistics.kv_pages_total
        self.planner.audit()

    def _take(self, output: Output) -> None:
        assert output.seq not in self.ends, "output after the end"
        self.outputs.append(output)
        self.texts[output.seq] += output.tokens
        if output.finish_reason is not None:
            self.ends[output.seq] = output

    def _check_order(self, plan: StepPlan, queue: list[Sequence]) -> None:
        """Nobody is passed over but those who wait for pages that others compute."""
        admitted = [admit.seq for admit in plan.admits]
        expected = [sequence.seq for sequence in queue if sequence.waits_for is None]
        assert [seq for seq in expected if seq in admitted] == expected[: len(admitted)]

    def _check_budget(self, plan: StepPlan) -> None:
        n_rows = 0
        for batch in plan.batches:
            for rows in batch.rows:
                end = rows.start + len(rows.tokens)
                n_rows += len(rows.tokens)
                assert rows.sample or end % self.page_size == 0, "a chunk ends inside a page"
        assert n_rows <= self.schedule.step_tokens
        assert len(plan.batches) == len(self.kv)

    def _write(self, view: RowsView) -> None:
        pool = self.planner._groups[view.group].pool
        for slot, token in zip(view.slots(), view.rows.tokens, strict=True):
            assert pool.place(slot // self.page_size) == pages.OWNED, "a write into a shared page"
            self.kv[view.group][slot] = token

    def _result(self, view: RowsView) -> Result:
        kv, size = self.kv[view.group], self.page_size
        table = view.state.pages
        seen = [kv[table[at // size] * size + at % size] for at in range(view.kv_len)]
        sampling = view.state.sampling
        tokens = (draw(sampling.seed, seen),) if view.rows.sample else ()
        logprobs = tuple(TokenLogprob(token, -1.0, ()) for token in tokens)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.prompt_logprobs >= 0:
            end = min(view.kv_len, view.state.prompt_len - 1)
            prompt_logprobs = tuple(
                TokenLogprob(view.state.tokens[at + 1], -float(at), ())
                for at in range(view.start, end)
            )
        return Result(
            view.rows.seq,
            tuple(range(view.n_rows)),
            tokens,
            logprobs if sampling.logprobs >= 0 else (),
            prompt_logprobs,
        )
