"""The one brain: events in, a totally ordered log of `StepPlan`s out.

Pure and synchronous: no clock, no randomness, no tensors, no I/O.
"""

from aserve.core.acceptance import Acceptance
from aserve.core.admission import refuse_misfit
from aserve.core.compose import Composer
from aserve.core.config import Layout, Schedule
from aserve.core.depth import depth_of
from aserve.core.draft_sizer import DraftSizer
from aserve.core.gauges import Gauges
from aserve.core.group import Group
from aserve.core.lane import Composition
from aserve.core.layout import Grid
from aserve.core.merge import Flight, Flights
from aserve.core.message import Drafting, Result, Rows, StepPlan, StepReport
from aserve.core.outbox import Outbox
from aserve.core.pages import CacheSpec as CacheSpec
from aserve.core.profile import compose_profile
from aserve.core.replica import fold
from aserve.core.request import FinishReason, Output, Request
from aserve.core.sequence import Phase, Sequence
from aserve.core.sizer import open_sizer
from aserve.core.speculation import Speculation
from aserve.core.status import PlannerState, ledger
from aserve.core.status import PlannerStatistics as PlannerStatistics
from aserve.core.verdict import known_rows, land, objection, settle
from aserve.errors import Desync, RequestError

AUDIT_STEPS = 1024  # the ledger's counts are checked every step, every single page this often
RETRY_AFTER_S_MAX = 30


class Planner:
    """Owns every queue, page and budget. See `aserve.core` for how its parts divide the work.

    A caller loops: `plan()` until it gives None, hand each plan to all ranks, hand each rank's
    report to `report()`. Without `speculation` no rows end with drafts.
    With dynamic chunks the first plans profile the first stage, with tokens below `vocab_size`.
    """

    def __init__(
        self,
        schedule: Schedule,
        cache: CacheSpec,
        *,
        context_len: int,
        layout: Layout = Layout(),  # noqa: B008
        speculation: Speculation = Speculation(),  # noqa: B008
        vocab_size: int = 1,
    ) -> None:
        assert min(context_len, cache.page_size) >= 1
        grid = Grid(layout)
        self._cache = cache
        self._context_len = context_len
        self._waiting_max = schedule.waiting_max
        self._depth = depth_of(layout, schedule)
        assert min(self._depth) >= 0, self._depth
        self._groups = [
            Group(index, cache, schedule.prefix_cache, speculation.bigrams)
            for index in range(grid.dp)
        ]
        self._outbox = Outbox(self._depth.microbatches)
        self.sizer = open_sizer(schedule, cache, grid, context_len)
        self._draft_sizer = DraftSizer(speculation, grid.pp)
        self._gauges = Gauges(self.sizer, self._draft_sizer, self._depth.lag_max > 0)
        self._vocab_size = vocab_size
        self._composer = Composer(
            self._groups, self._depth, schedule, self._outbox, speculation.most, self.sizer
        )
        self._flights = Flights(grid)
        self._acceptance = Acceptance()
        self._sequences: dict[int, Sequence] = {}  # neither finished nor aborted
        self._n_steps_before = 0  # the last reset
        self._n_added = 0
        self._n_rows = 0
        self._prefix_query_len = 0
        self._prefix_hit_len = 0
        self._begin()

    def _begin(self) -> None:
        """The ranks are new."""
        self._taken = [0] * self._depth.microbatches  # places of plans in flight, by microbatch
        self._step = 0
        self._microbatch = 0  # whose turn is next
        self._digest = 0

    def reset(self) -> None:
        """The ranks are new: what was in flight never was, and who ran waits, first in its class.

        Known tokens stay, so a text goes on where its last report left it; entries of prompt
        logprobs that were given out are not given again.
        """
        running = [sequence for group in self._groups for sequence in group.running.values()]
        running.sort(key=lambda sequence: sequence.order)
        for sequence in self._sequences.values():
            sequence.restart()
        for group in self._groups:
            group.reset()
        self._outbox.reset()
        self._composer.reset()
        self._flights.reset()
        self._gauges.reset()
        for sequence in reversed(running):
            sequence.enter(Phase.WAITING)
            self._composer.queue.put_first(sequence)
        self._n_steps_before += self._step
        self._begin()
        self.audit()

    @property
    def request_len_max(self) -> int:
        """The most tokens, prompt and output together, that one request may have."""
        return min(self._context_len, self._cache.pages_total * self._cache.page_size + 1)

    @property
    def waiting_free(self) -> int:
        """How many more sequences `add` takes before it answers 429."""
        return max(0, self._waiting_max - len(self._composer.queue))

    @property
    def profiling(self) -> bool:
        """Whether requests wait for the profile of the first stage."""
        return self.sizer.profile_len > 0

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError: 400 if it is malformed or longer than the context, 413 if its KV can
        never fit the pool, 429 if the queue is full.
        """
        assert request.seq not in self._sequences, request.seq
        assert all(request.seq not in group.leaving for group in self._groups), request.seq
        refuse_misfit(request, self._context_len, self.request_len_max)
        if not self.waiting_free:
            n_waiting = len(self._composer.queue)
            raise RequestError(
                f"{n_waiting} sequences are waiting, at most {self._waiting_max} may; try again",
                status=429,
                code="queue_full",
                retry_after_s=min(
                    RETRY_AFTER_S_MAX, 1 + n_waiting // (1 + self._composer.n_running)
                ),
            )
        sequence = Sequence(request, self._n_added)
        self._n_added += 1
        self._sequences[request.seq] = sequence
        self._composer.queue.append(sequence)

    def finish(self, seq: int, reason: FinishReason) -> Output | None:
        """End a sequence from above (abort, a stop string), whatever it is doing; None: it is over.

        Its pages come back at once, or with the report of the step that still writes them.
        """
        sequence = self._sequences.get(seq)
        if sequence is None:
            return None
        if sequence.phase == Phase.WAITING:
            self._composer.queue.remove(sequence)
        else:
            self._leave(sequence, keep=reason != "error")
        self._over(sequence)
        return Output(seq, (), (), (), reason, None, max(0, sequence.cached_len))

    def _over(self, sequence: Sequence) -> None:
        sequence.enter(Phase.FINISHED)
        sequence.waits_for = None
        del self._sequences[sequence.seq]

    def _leave(self, sequence: Sequence, keep: bool) -> None:
        self._composer.remove(sequence)
        if not sequence.in_flight:
            self._outbox.drop(sequence, done=True)
        self._groups[sequence.group].leave(sequence, keep)
        if not self._composer.n_running:
            self._composer.ratio.idle()

    def plan(self) -> StepPlan | None:
        """The next step; None if there is nothing to do now, or too much is unanswered."""
        if self.sizer.profile_len:
            return self._plan_profile()
        while True:
            n_retractions = self._composer.n_retractions
            for offset in range(self._depth.microbatches):
                microbatch = (self._microbatch + offset) % self._depth.microbatches
                if self._taken[microbatch] > self._depth.lag_max:
                    continue
                composition = self._composer.compose(microbatch)
                if any([lane.rows for lane in composition.lanes]):
                    composition.drafting = self._drafting(composition)
                    plan = self._emit(composition)
                    self.check()
                    return plan
            # Who was retracted in vain may find a place in a microbatch that was asked before.
            if n_retractions == self._composer.n_retractions:
                if not len(self._flights):
                    self._gauges.idle()
                return None

    def _drafting(self, composition: Composition) -> Drafting:
        """How large the drafts are that the rows of a step end with."""
        return self._gauges.drafting(composition, self._composer.n_busy)

    def _plan_profile(self) -> StepPlan | None:
        """The next step of the profile, alone in flight: nothing else is measured."""
        if len(self._flights):
            return None
        n_rows = self.sizer.profile_len
        seq = -1 - n_rows  # clients' are not negative
        composition = compose_profile(
            self._composer, self._microbatch, n_rows, seq, self._vocab_size
        )
        plan = self._emit(composition)
        self.check()
        return plan

    def _emit(self, composition: Composition) -> StepPlan:
        step, microbatch = self._step, composition.microbatch
        commits, drops, earlier = self._outbox.collect(microbatch)
        plan = StepPlan(
            step,
            microbatch,
            commits,
            drops,
            (),
            tuple(composition.admits),
            composition.batches(),
            (),
            composition.drafting,
        )
        for admit in composition.admits:
            self._prefix_query_len += len(admit.tokens)
            self._prefix_hit_len += admit.kv_len
        numbers = [step, microbatch, *earlier, *composition.numbers()]
        self._digest = fold(self._digest, numbers)
        flight = Flight(plan, self._digest, composition)
        flight.load = self._gauges.load(composition)
        # Nothing is planned behind what is open: it takes all places of its microbatch.
        flight.places = 1 + self._depth.lag_max * flight.is_open
        self._gauges.departs(flight)
        self._flights.depart(flight)
        self._taken[microbatch] += flight.places
        self._step = step + 1
        self._microbatch = (microbatch + 1) % self._depth.microbatches
        if not self.sizer.profile_len:
            self._n_rows += composition.n_rows
        return plan

    def report(self, report: StepReport) -> tuple[Output, ...]:
        """What one rank says of a step; with its last rank's report, the outputs of the step.

        Nothing goes out before every rank agreed on the digest: a client cannot be told a token
        that a rank which was out of step helped to draw. Raises Desync if the rank's digest or a
        result cannot follow from the plan.
        """
        flight = self._flights.flight_of(report)
        group = self._flights.group_of(report.rank)
        if group is not None:
            rows = flight.plan.batches[group].rows
            settling = list(zip(flight.sequences[group], rows, report.results, strict=True))
            for sequence, row, result in settling:
                wrong = objection(sequence, row, result, flight.plan.drafting)
                if wrong is not None:
                    raise Desync(report.rank, report.step, wrong)
            flight.settling[group] = settling
        if not self._flights.count(flight, report):
            return ()
        self._taken[flight.plan.microbatch] -= flight.places
        self._gauges.measure(flight)
        outputs: list[Output] = []
        for settling in flight.settling:
            for sequence, row, result in settling:
                sequence.in_flight -= 1
                if sequence.phase == Phase.FINISHED:
                    land(sequence, row, result)
                    continue
                output = self._settle(sequence, row, result, flight.plan.drafting)
                if output is not None:
                    outputs.append(output)
        self._land(flight)
        return tuple(outputs)

    def _land(self, flight: Flight) -> None:
        """No rank has anything of a step left to do: who only waited for that goes now."""
        for group, scheduled in zip(self._groups, flight.sequences, strict=True):
            if not (group.leaving or group.yielding):
                continue
            for sequence in scheduled:
                if sequence.in_flight:
                    continue
                if group.leaving.get(sequence.seq) is sequence:
                    self._outbox.drop(sequence, done=True)
                    group.land(sequence)
                elif group.yielding.get(sequence.seq) is sequence:
                    self._composer.retract(sequence)

    def _settle(
        self, sequence: Sequence, rows: Rows, result: Result, drafting: Drafting
    ) -> Output | None:
        cached_len = sequence.cached_len
        if result.error is not None:
            self._leave(sequence, keep=False)
            self._over(sequence)
            return Output(rows.seq, (), (), (), "error", None, cached_len, result.error)
        commit, reason = settle(sequence, rows, result)
        tokens: tuple[int, ...] = ()
        if commit is not None:
            self._outbox.commit(sequence.microbatch, commit)
            tokens = commit.tokens
            self._acceptance.count(rows, result)
            self._draft_sizer.verified(
                sequence.asked, len(rows.tokens) - 1, len(result.path) - known_rows(rows)
            )
            sequence.asked = drafting
        prompt_logprobs = result.prompt_logprobs
        if prompt_logprobs:
            # After a retraction the first ones come a second time.
            prompt_logprobs = prompt_logprobs[max(0, sequence.prompt_logprobs_len - rows.start) :]
            sequence.prompt_logprobs_len += len(prompt_logprobs)
        if reason is not None:
            self._leave(sequence, keep=True)
            self._over(sequence)
        elif sequence.cached_pages < sequence.promised_pages:
            group = self._groups[sequence.group]
            n_pages = min(sequence.computed_len // group.page_size, sequence.promised_pages)
            group.store(sequence, n_pages)
        if not tokens and not prompt_logprobs:
            return None
        stop_token = tokens[-1] if reason == "stop" else None
        logprobs = result.logprobs[: len(tokens)]
        return Output(rows.seq, tokens, logprobs, prompt_logprobs, reason, stop_token, cached_len)

    def flush_cache(self) -> bool:
        """Free every cached page that no sequence uses; whether the cache is now empty."""
        for group in self._groups:
            group.tree.flush()
        return all(group.tree.n_pages == 0 for group in self._groups)

    def statistics(self) -> PlannerStatistics:
        pools = [group.pool for group in self._groups]
        n_free = sum(pool.n_free for pool in pools)
        n_cached = sum(group.tree.n_evictable for group in self._groups)
        n_total = sum(pool.pages_total for pool in pools)
        return PlannerStatistics(
            running=self._composer.n_running,
            waiting=len(self._composer.queue),
            kv_pages_total=n_total,
            kv_pages_used=n_total - n_free - n_cached,
            kv_pages_free=n_free,
            kv_pages_cached=n_cached,
            prefix_query_tokens=self._prefix_query_len,
            prefix_hit_tokens=self._prefix_hit_len,
            steps=self._n_steps_before + self._step,
            rows=self._n_rows,
            requests=self._n_added,
            retractions=self._composer.n_retractions,
            chunks_warning=self.sizer.warning,
            drafts=self._acceptance.statistics(),
        )

    def state(self) -> PlannerState:
        """Who waits for whom, and where the pages are."""
        groups = self._groups
        return PlannerState(
            step=self._step,
            digest=self._digest,
            ranks=self._flights.progress(),
            in_flight=self._flights.in_flight(),
            busy=tuple([n_taken > self._depth.lag_max for n_taken in self._taken]),
            waiting=len(self._composer.queue),
            running=tuple([len(group.running) for group in groups]),
            prefilling=tuple([len(group.prefilling) for group in groups]),
            leaving=tuple([len(group.leaving) for group in groups]),
            yielding=tuple([len(group.yielding) for group in groups]),
            pages=tuple([ledger(group) for group in groups]),
            chunks=self.sizer.words(),
            draft_sizes=self._draft_sizer.words(),
            drafts=self._acceptance.statistics(),
        )

    def check(self) -> None:
        """Assert that every page is in exactly one place; runs after every plan.

        By the ledger's counts each time, by walking every page and sequence now and then.
        """
        for group in self._groups:
            group.check()
        if self._step % AUDIT_STEPS == 0:
            self.audit()

    def audit(self) -> None:
        """The slow twin of `check`: walks every page, sequence and tree node."""
        for group in self._groups:
            group.audit()
        assert self._composer.n_running + len(self._composer.queue) == len(self._sequences)
        self._composer.audit()
