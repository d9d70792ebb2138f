"""What must hold in every simulated run, checked from outside; a broken law is named and kept.

Supervision restarts ranks that die of a broken law too, so it is written down here first: a run in
which the text came out right after all is still a failed one.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import wraps
from typing import Any

from aserve.core.layout import Grid
from aserve.core.message import Rows, StepPlan, StepReport
from aserve.core.pages import OWNED
from aserve.core.planner import Planner
from aserve.errors import Desync, PlaneError
from aserve.testing.kv_pool import ForeignRead
from aserve.testing.pair_pool import ForeignPair
from aserve.testing.swarm import Setup

PLANS_MAX = 6000  # a run that needs more goes round in circles


class Law(StrEnum):
    TEXT = "text"  # tokens are the oracle's (a part of them, if the client gave up)
    END = "end"  # and so is the way in which a request ends
    LOGPROBS = "logprobs"  # each derived number once, in its place
    PAGES = "pages"  # every page is in exactly one place after every event
    HOLDERS = "holders"  # no page is handed out while a sequence on the ranks still has it
    TENANTS = "tenants"  # cached pages are shared within one salt
    WRITES = "writes"  # no step in flight writes a page that its sequence does not own
    READS = "reads"  # nobody reads in a page of its own what somebody else wrote
    PAIRS = "pairs"  # a drafter reads KV of the text that it continues, also from the cache
    DIGEST = "digest"  # ranks and planner agree, and results follow from plans
    RANK = "rank"  # no rank dies by itself
    LEADER = "leader"  # nor do the leader and the planner
    PLANES = "planes"  # ranks meet, unless they were told to break
    ANSWERS = "answers"  # a rank that is asked what it is at says so
    LAG = "lag"  # a row is planned ahead of its token only behind a draw that is on its way, alone
    BOUNDS = "bounds"  # queues, steps in flight and rows of a step are bounded
    STALL = "stall"  # after the last trouble everything ends
    IDLE = "idle"  # and then nothing is left anywhere
    RESTARTS = "restarts"  # ranks are started anew where they broke, and nowhere else


class Broken(Exception):
    """A law and how it was broken."""

    def __init__(self, law: Law, message: str) -> None:
        self.law = law
        super().__init__(f"the law {law.value!r} is broken: {message}")


class Laws:
    """The first broken one counts: what follows it is rubble."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.broken: Broken | None = None
        self.plans: list[StepPlan] = []
        self.on_plan: Callable[[StepPlan], None] = lambda plan: None
        self.on_report: Callable[[StepReport], None] = lambda report: None
        self.log = Log(setup)
        self._world = setup.layout.pp * setup.layout.tp

    def note(self, law: Law, message: str) -> None:
        if self.broken is None:
            self.broken = Broken(law, message)

    def require(self, law: Law, holds: bool, message: str) -> None:
        if not holds:
            self.note(law, message)

    def died(self, where: str, error: BaseException) -> None:
        """An error that nobody planted. Whoever asserted has the last word on which law it was."""
        law = Law.LEADER if where == "the planner" else Law.RANK
        if isinstance(error, ForeignRead):
            law = Law.READS
        elif isinstance(error, ForeignPair):
            law = Law.PAIRS
        elif isinstance(error, Desync):
            law = Law.DIGEST
        elif isinstance(error, PlaneError):
            law = Law.PLANES
        self.note(law, f"{where}: {described(error)}")

    def watch(self, planner: Planner) -> None:
        """Put the laws around a planner: each of its verbs is followed by them."""
        for name in ("add", "finish", "plan", "report", "reset"):
            setattr(planner, name, self._lawful(planner, name))

    def _lawful(self, planner: Planner, name: str) -> Callable[..., Any]:
        verb = getattr(planner, name)

        @wraps(verb)
        def lawful(*args: Any) -> Any:
            try:
                found = verb(*args)
            except (AssertionError, LookupError, TypeError, Desync) as error:
                self.died("the planner", error)
                raise
            if name == "plan" and found is not None:
                self.plans.append(found)
                self.on_plan(found)
                self.log.planned(found, self.note)
            elif name == "report":
                self.on_report(args[0])
                self.log.reported(args[0], self._world)
            elif name == "reset":
                self.log.reset()
            self.check(planner, thorough=name != "report" and found is not None)
            return found

        return lawful

    def check(self, planner: Planner, *, thorough: bool) -> None:
        """What must hold of the planner between any two of its events; after each plan `thorough`
        walks every page."""
        try:
            if thorough:
                planner.audit()
            else:
                planner.check()
        except AssertionError as error:
            self.note(Law.PAGES, described(error))
        setup, schedule = self.setup, self.setup.schedule
        statistics = planner.statistics()
        in_flight_max = setup.depth.in_flight_max
        bounds = (
            (len(self.log.in_flight), in_flight_max, "steps in flight"),
            (statistics.waiting, schedule.waiting_max + schedule.running_max, "waiting"),
            (statistics.running, schedule.running_max, "running"),
            (len(self.plans), PLANS_MAX, "plans: they lead nowhere"),
        )
        for value, most, what in bounds:
            if value > most:
                self.note(Law.BOUNDS, f"{value} {what}, at most {most}")
        for write in self.log.writes():
            self._check_write(planner, *write)

    def _check_write(self, planner: Planner, step: int, seq: int, group: int, page: int) -> None:
        """Until its group's leader has told of the step, the page is the sequence's own; until all
        ranks have, the sequence holds it, if only by a lock in the cache."""
        owner = planner._groups[group]
        sequence = owner.running.get(seq) or owner.leaving.get(seq)
        held = sequence is not None and page in sequence.pages
        if held and not self.log.told(step, group):
            assert sequence is not None
            held = page in sequence.pages[sequence.cached_pages :]
            held = held and owner.pool.place(page) == OWNED
        if not held:
            text = f"step {step} still writes page {page}, which sequence {seq} does not own"
            self.note(Law.WRITES, text)


def described(error: BaseException) -> str:
    """An error with the line that raised it; assertions say little else."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        code = trace.tb_frame.f_code
        where = f" ({code.co_qualname} in {code.co_filename.rpartition('/')[2]})"
    return f"{type(error).__name__}: {error}{where}"


def is_open(plan: StepPlan) -> bool:
    """Whether the shape of the rows behind it depends on what it gives: a draft, or a path."""
    is_tree = any(rows.parents for batch in plan.batches for rows in batch.rows)
    return is_tree or plan.drafting.tokens > 0


class Log:
    """What the plans say, taken literally: page tables, who holds each page, what is written."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        grid = Grid(setup.layout)
        self._salts = {
            request.seq: request.cache_salt
            for arrival in setup.arrivals
            for request in arrival.requests
        }
        self._ends = {
            request.seq: len(request.tokens) + request.max_tokens
            for arrival in setup.arrivals
            for request in arrival.requests
        }
        self._leaders = [grid.leader(dp) for dp in range(grid.dp)]
        self.reset()

    def reset(self) -> None:
        self.in_flight: dict[int, StepPlan] = {}
        self._reports: dict[int, set[int]] = {}  # by step, the ranks
        self._written: dict[int, list[tuple[int, int, int]]] = {}
        self._tables: dict[int, tuple[int, list[int]]] = {}  # seq: group, pages
        self._holders: dict[tuple[int, int], set[int]] = {}
        self._writers: dict[tuple[int, int], int] = {}  # of a page, who had it as its own last
        self._drawing: dict[int, int] = {}  # by seq: draws in flight

    def writes(self) -> Iterable[tuple[int, int, int, int]]:
        """(step, seq, group, page) of every write that may still happen."""
        for step, written in self._written.items():
            for write in written:
                yield step, *write

    def told(self, step: int, group: int) -> bool:
        """Whether the leader of the group has reported a step in flight."""
        return self._leaders[group] in self._reports.get(step, ())

    def planned(self, plan: StepPlan, note: Callable[[Law, str], None]) -> None:
        for seq in plan.drops:
            group, pages = self._tables.pop(seq, (0, []))
            for page in pages:
                self._holders[group, page].discard(seq)
        for step, before in self.in_flight.items():
            if before.microbatch == plan.microbatch and is_open(before):
                note(Law.LAG, f"step {plan.step} is planned before the drafts of {step} are known")
        admits = {admit.seq: admit for admit in plan.admits}
        written: list[tuple[int, int, int]] = []
        n_rows, rows_max = 0, self._setup.schedule.step_tokens
        for group, batch in enumerate(plan.batches):
            for rows in batch.rows:
                n_rows += len(rows.tokens)
                self._drawn(rows, note)
                if rows.seq < 0:  # a step that only measures may be longer than one that serves
                    rows_max = max(rows_max, int(1.25 * self._setup.schedule.step_tokens))
                admit = admits.get(rows.seq)
                if admit is not None:
                    self._tables[rows.seq] = (group, list(admit.pages))
                    self._shared(rows.seq, group, admit.pages, note)
                self._appended(rows.seq, group, rows.pages, note)
                pages = self._tables.get(rows.seq, (group, []))[1]
                size = self._setup.page_size
                last = (rows.start + len(rows.tokens) - 1) // size
                written += [(rows.seq, group, p) for p in pages[rows.start // size : last + 1]]
        if n_rows > rows_max:
            note(Law.BOUNDS, f"step {plan.step} has {n_rows} rows")
        self.in_flight[plan.step] = plan
        self._written[plan.step] = written

    def _drawn(self, rows: Rows, note: Callable[[Law, str], None]) -> None:
        """A sequence's draws are at most as many as it may still draw, and no row overtakes one."""
        n_drawing = self._drawing.get(rows.seq, 0)
        if rows.is_lagging != bool(n_drawing):
            note(Law.LAG, f"{rows} is planned while {n_drawing} of its draws are on their way")
        if n_drawing > self._setup.depth.lag_max:
            note(Law.LAG, f"{rows} lags {n_drawing} draws behind")
        end = self._ends.get(rows.seq, rows.start + len(rows.tokens) + 1)
        if rows.sample and rows.start + len(rows.tokens) >= end and not rows.parents:
            note(Law.LAG, f"{rows} would draw beyond the last token that was asked for")
        if rows.sample:
            self._drawing[rows.seq] = n_drawing + 1

    def _shared(
        self, seq: int, group: int, pages: tuple[int, ...], note: Callable[[Law, str], None]
    ) -> None:
        for page in pages:
            self._holders.setdefault((group, page), set()).add(seq)
            writer = self._writers.get((group, page), seq)
            if self._salts.get(writer, "") != self._salts.get(seq, ""):
                note(Law.TENANTS, f"sequence {seq} is given page {page}, computed for {writer}")

    def _appended(
        self, seq: int, group: int, pages: tuple[int, ...], note: Callable[[Law, str], None]
    ) -> None:
        table = self._tables.setdefault(seq, (group, []))[1]
        for page in pages:
            holders = self._holders.setdefault((group, page), set())
            if holders:
                note(Law.HOLDERS, f"page {page} goes to {seq} while {sorted(holders)} have it")
            holders.add(seq)
            table.append(page)
            self._writers[group, page] = seq

    def reported(self, report: StepReport, world: int) -> None:
        """A step is over when every rank has said so."""
        ranks = self._reports.setdefault(report.step, set())
        ranks.add(report.rank)
        if len(ranks) == world:
            plan = self.in_flight.get(report.step)
            for rows in [rows for batch in plan.batches for rows in batch.rows] if plan else []:
                self._drawing[rows.seq] = self._drawing.get(rows.seq, 0) - rows.sample
            for book in (self.in_flight, self._reports, self._written):
                book.pop(report.step, None)
