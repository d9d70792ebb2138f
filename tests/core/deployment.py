"""Planner and ranks in a pure loop over a legible model: its KV is the tokens themselves.

The model writes each row's token to the row's slot and draws a hash of all it reads back through
the page table, so that a fault in paging, caching, compaction or order changes the text; `oracle`
knows the text and has never heard of pages. One replica stands for all ranks, whose reports may
come in any order that keeps each rank's own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from random import Random
from zlib import crc32

from aserve.core import pages
from aserve.core.codec import decode_plan, decode_report, encode
from aserve.core.config import Layout, Schedule
from aserve.core.depth import depth_of
from aserve.core.layout import Grid
from aserve.core.message import (
    LAGGING,
    NO_DRAFTING,
    Drafting,
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
from aserve.core.speculation import Speculation, bounded
from aserve.core.tree import Draft, cut

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


def drafted(seed: int, tokens: list[int], n_max: int) -> Draft:
    """A tree below the last of `tokens`: true continuations among decoys, in no kind order."""
    random = Random(crc32(repr((seed, *tokens)).encode()))
    nodes: list[int] = []
    parents: list[int] = []
    contexts: list[list[int]] = []
    frontier = [-1]
    while frontier and len(nodes) < n_max:
        parent = frontier.pop(0)
        context = tokens if parent < 0 else contexts[parent]
        children = random.sample(range(VOCAB), random.choice([0, 1, 2]))
        if random.random() < 0.8:
            children.insert(random.randint(0, len(children)), draw(seed, context))
        for child in dict.fromkeys(children):
            frontier.append(len(nodes))
            nodes.append(child)
            parents.append(parent)
            contexts.append([*context, child])
    return Draft(tuple(nodes[:n_max]), tuple(parents[:n_max]))


class Deployment:
    """`pump` goes on until nothing is left to do; `plan_one` and `report_one` go step by step."""

    def __init__(
        self,
        *,
        page_size: int = 4,
        pages_total: int = 16,
        pages_kept: int | None = None,
        groups: int = 1,
        in_flight_max: int = 1,
        layout: Layout | None = None,
        context_len: int = 1000,
        draft_max: int = 0,
        whims: Random | None = None,
        bigrams: bool = False,
        adaptive: bool = False,
        **schedule: int | bool,
    ) -> None:
        layout = layout or Layout(dp=groups, tp=groups, pp=in_flight_max)
        groups = layout.dp
        self.page_size = page_size
        self.pages_total = pages_total
        overlap = max(0, in_flight_max - layout.pp)  # rows lag where there is one stage
        self.schedule = Schedule(
            **{"step_tokens": 16 * groups, "running_max": 8, "overlap": overlap, **schedule}
        )
        self.in_flight_max = depth_of(layout, self.schedule).in_flight_max
        drafting = NO_DRAFTING if not draft_max else Drafting(draft_max, draft_max, draft_max)
        self.speculation = Speculation(drafting, adaptive, bigrams)
        self.grid = Grid(layout)
        self.planner = Planner(
            self.schedule,
            CacheSpec(page_size, pages_total, pages_kept),
            context_len=context_len,
            layout=layout,
            speculation=self.speculation,
            vocab_size=VOCAB,
        )
        if whims is not None:
            self._draft_by_chance(whims)
        self._open_ranks()
        self.requests: dict[int, Request] = {}
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, Output] = {}
        self.finished_from_above: dict[int, str] = {}
        self.outputs: list[Output] = []
        self.plans: list[StepPlan] = []  # since the last reset
        self.all_plans: list[StepPlan] = []
        self.micros: Callable[[StepPlan], int] = lambda plan: 0  # of the first stage
        self.fault: Callable[[StepPlan], StepPlan] = lambda plan: plan

    def _draft_by_chance(self, whims: Random) -> None:
        """Drafts of any size, or none, in any step."""
        most = self.speculation.most
        sizes = [NO_DRAFTING, NO_DRAFTING, bounded(Drafting(1, 1, most.tokens)), most]
        self.planner._drafting = lambda composition: (  # type: ignore[method-assign]
            whims.choice(sizes) if most.tokens and composition.n_draws else NO_DRAFTING
        )

    def _open_ranks(self) -> None:
        self.replica = Replica(self.page_size)
        n_slots = self.pages_total * self.page_size
        self.kv = [[EMPTY] * n_slots for _ in range(self.grid.dp)]
        self.reports: deque[StepReport] = deque()
        self.written: dict[int, set[tuple[int, int]]] = {}  # (group, page) by step
        self.drawn: dict[int, int] = {}  # by sequence, its last token

    def reset(self) -> None:
        """All ranks died and new ones stand in their places."""
        self._open_ranks()
        self.plans = []
        self.planner.reset()
        self.planner.audit()

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
        self.all_plans.append(plan)
        applied = self.replica.apply(decode_plan(encode(self.fault(plan))))
        for move in applied.moves:
            kv = self.kv[move.group]
            for slot_from, slot_to in zip(move.slots_from, move.slots_to, strict=True):
                kv[slot_to] = kv[slot_from]
        self._check_ranks(plan)
        for view in applied.views:
            self._write(view)
        results: dict[int, list[Result]] = {group: [] for group in range(self.grid.dp)}
        for view in applied.views:
            results[view.group].append(self._result(view, plan.drafting))
        leads = {self.grid.leader(group): group for group in results}
        for rank in range(self.grid.world):
            own = tuple(results[leads[rank]]) if rank in leads else ()
            micros = self.micros(plan) if rank < self.grid.tp else 10**9
            report = StepReport(plan.step, rank, self.replica.digest, own, (), (), micros)
            self.reports.append(decode_report(encode(report)))
        steps_in_flight = dict.fromkeys(report.step for report in self.reports)
        assert len(steps_in_flight) <= self.in_flight_max
        return plan

    def report_one(self) -> tuple[Output, ...]:
        """All reports of the oldest step."""
        step = self.reports[0].step
        outputs: list[Output] = []
        while self.reports and self.reports[0].step == step:
            outputs += self._report(self.reports.popleft())
        return tuple(outputs)

    def report_rank(self, random: Random) -> None:
        """The oldest report of a random rank."""
        rank = random.choice([report.rank for report in self.reports])
        report = next(report for report in self.reports if report.rank == rank)
        self.reports.remove(report)
        self._report(report)

    def _report(self, report: StepReport) -> tuple[Output, ...]:
        outputs = self.planner.report(report)
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
        admitted = [admit.seq for admit in plan.admits if admit.seq >= 0]
        expected = [sequence.seq for sequence in queue if sequence.waits_for is None]
        assert [seq for seq in expected if seq in admitted] == expected[: len(admitted)]

    def _check_ranks(self, plan: StepPlan) -> None:
        """Ranks hold what the planner thinks, and get no page that a step in flight writes."""
        groups = self.planner._groups
        held = [seq for group in groups for seq in (*group.running, *group.leaving)]
        assert sorted(self.replica.sequences) == sorted(held)
        in_flight = dict.fromkeys(report.step for report in self.reports)
        self.written = {step: self.written[step] for step in in_flight}
        for group, batch in enumerate(plan.batches):
            given = {(group, page) for rows in batch.rows for page in rows.pages}
            for written in self.written.values():
                assert not given & written, "a page changes hands while it is written"

    def _check_budget(self, plan: StepPlan) -> None:
        if any(admit.seq < 0 for admit in plan.admits):
            return  # of the profile: a scratch sequence, of a quarter more rows at most
        n_rows = 0
        for batch in plan.batches:
            for rows in batch.rows:
                end = rows.start + len(rows.tokens)
                n_rows += len(rows.tokens)
                assert rows.sample or end % self.page_size == 0, "a chunk ends inside a page"
                assert len(rows.tokens) <= 1 + self.speculation.most.tokens or not rows.parents
        assert n_rows <= self.schedule.step_tokens
        assert len(plan.batches) == len(self.kv)

    def _write(self, view: RowsView) -> None:
        pool = self.planner._groups[view.group].pool
        written = self.written.setdefault(self.replica.step, set())
        written |= {(view.group, slot // self.page_size) for slot in view.slots()}
        for slot, token in zip(view.slots(), view.rows.tokens, strict=True):
            assert pool.place(slot // self.page_size) == pages.OWNED, "a write into a shared page"
            self.kv[view.group][slot] = self.drawn[view.rows.seq] if token == LAGGING else token

    def _result(self, view: RowsView, drafting: Drafting) -> Result:
        sampling, rows = view.state.sampling, view.rows
        path = tuple(range(view.n_rows))
        tokens: tuple[int, ...] = ()
        if rows.parents:
            path, tokens = self._accept(view)
        elif rows.sample:
            tokens = (draw(sampling.seed, self._read(view, view.kv_len)),)
            self.drawn[rows.seq] = tokens[0]
        draft = Draft((), ())
        if rows.sample and drafting.tokens:
            known = view.state.tokens if rows.parents else self._read(view, view.kv_len)
            draft = drafted(sampling.seed, [*known, *tokens], drafting.tokens)
            draft = cut(draft, len(draft.tokens), drafting.depth)
        logprobs = tuple(TokenLogprob(token, -1.0, ()) for token in tokens)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.prompt_logprobs >= 0:
            end = min(view.start + (1 if rows.parents else view.n_rows), view.state.prompt_len - 1)
            prompt_logprobs = tuple(
                TokenLogprob(view.state.tokens[at + 1], -float(at), ())
                for at in range(view.start, end)
            )
        return Result(
            rows.seq,
            path,
            tokens,
            logprobs if sampling.logprobs >= 0 else (),
            prompt_logprobs,
            None,
            *draft,
        )

    def _read(self, view: RowsView, end: int) -> list[int]:
        kv, size, table = self.kv[view.group], self.page_size, view.state.pages
        return [kv[table[at // size] * size + at % size] for at in range(end)]

    def _accept(self, view: RowsView) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Walk down the tree as long as a child is what its parent draws."""
        rows, kv, slots = view.rows, self.kv[view.group], view.slots()
        seen = self._read(view, view.start)
        path, tokens = [0], []
        while True:
            seen.append(kv[slots[path[-1]]])
            token = draw(view.state.sampling.seed, seen)
            tokens.append(token)
            children: Iterator[int] = (
                row
                for row, parent in enumerate(rows.parents)
                if parent == path[-1] and rows.tokens[row] == token
            )
            child = next(children, None)
            if child is None:
                return tuple(path), tuple(tokens)
            path.append(child)
