"""A whole deployment in one thread under a mock clock: real planner, leader, supervisor, ranks,
codec and planes; only the model, the clients and the time are stand-ins.

Everything follows from (seed, setup): the same world runs the same way, bit for bit.
"""

import hashlib
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from random import Random
from typing import Any

import msgspec
import trio
import trio._core._run as trio_run
from trio.testing import MockClock

from aserve.actors.launch import run_as_rank
from aserve.actors.leader import Leader
from aserve.actors.placement import Known, Ranks
from aserve.actors.rank import Watch, run_rank, state_of
from aserve.actors.supervision import State
from aserve.actors.supervisor import CURABLE, Supervisor
from aserve.core.codec import encode
from aserve.core.config import Cache, Config
from aserve.core.config import Ranks as RanksConfig
from aserve.core.layout import Grid
from aserve.core.message import StepPlan, StepReport
from aserve.core.planner import CacheSpec
from aserve.core.speculation import speculation_of
from aserve.errors import PeerError, PlaneError, PlaneMismatch, RequestError
from aserve.planes.hidden import MemoryEnd, open_hidden_plane
from aserve.planes.inline import compute_inline, open_inline_planes
from aserve.planes.layer import LayerEnd
from aserve.planes.request import FollowerEnd
from aserve.planes.request_memory import open_request_plane
from aserve.testing.client import LegibleChoice
from aserve.testing.laws import Broken, Law, Laws
from aserve.testing.oracle import Said, say
from aserve.testing.stage import LegibleStage, Part, Work
from aserve.testing.swarm import CONTEXT_LEN, Arrival, Setup, Trouble
from aserve.testing.trouble import BREAKING, PlannedCrash, Start

PLANE_S = 0.25  # virtual
NOTICED_WITHIN_S = 1.0  # a dead rank, however little there is to do
ANSWERS_WITHIN_S = 0.5  # a rank that is asked what it is at
ENDS_WITHIN_S = 30.0  # after the last arrival and the last trouble

# What a rank may die of after its surroundings broke.
UNMET = (
    *(PlaneError, PeerError),
    *(trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel),
)


class Outcome(msgspec.Struct, frozen=True):
    """What a run came to. `hash` covers every plan and report, their times, and what was said."""

    broken: Broken | None
    plans: tuple[StepPlan, ...]
    hash: str
    restarts: int
    retractions: int
    hit_tokens: int
    accepted: int  # drafted tokens
    refused: int  # requests, for want of room in the queue
    tokens: int
    virtual_s: float


class World:
    """One deployment and its clients. `run` once; what happened is in the Outcome."""

    def __init__(self, seed: int, setup: Setup) -> None:
        self.seed = seed
        self.setup = setup
        self.random = Random(seed)
        self.laws = Laws(setup)
        self.laws.on_plan = self._planned
        self.laws.on_report = self._reported
        grid = Grid(setup.layout)
        cache = CacheSpec(setup.page_size, setup.pages_total)
        bigrams = speculation_of(setup.spec).bigrams
        self.part = Part(grid, setup.shape, cache, bigrams)
        self.stages: dict[int, LegibleStage] = {}  # of the present ranks
        self.start: Start | None = None  # while ranks are there
        self.started = trio.Event()  # set while ranks are there
        self.n_in_flight_max = 0
        self.n_struck = 0  # troubles that may break the ranks, so far
        self._said: dict[int, Said] = {}
        self._choices: list[LegibleChoice] = []
        self._aborted: set[int] = set()
        self._refused = 0
        self._accepted = 0
        self._hash = hashlib.sha256()
        n_beyond = speculation_of(setup.spec).most.tokens + 1
        for arrival in setup.arrivals:
            for request in arrival.requests:
                self._said[request.seq] = say(request, setup.shape, n_beyond)

    def guess(self, seq: int, n_generated: int) -> tuple[int, ...]:
        said = self._said[seq]
        return (said.tokens + said.beyond)[n_generated:]

    def run(self) -> Outcome:
        with repeatable(self.seed), quiet():
            statistics, restarts, virtual_s = trio.run(
                self._main, clock=MockClock(autojump_threshold=0)
            )
        for choice in self._choices:
            self._hash.update(repr((choice.seq, choice.tokens, choice.finish_reason)).encode())
        return Outcome(
            broken=self.laws.broken,
            plans=tuple(self.laws.plans[-10:]),
            hash=self._hash.hexdigest(),
            restarts=restarts,
            retractions=statistics.retractions,
            hit_tokens=statistics.prefix_hit_tokens,
            accepted=self._accepted,
            refused=self._refused,
            tokens=sum(len(choice.tokens) for choice in self._choices),
            virtual_s=virtual_s,
        )

    async def _main(self) -> tuple[Any, int, float]:
        setup = self.setup
        config = Config(
            layout=setup.layout,
            schedule=setup.schedule,
            cache=Cache(page_size=setup.page_size),
            spec=setup.spec,
            ranks=RanksConfig(plane_s=PLANE_S, restarts_max=setup.restarts_max),
        )
        last_ms = max((arrival.at_ms for arrival in setup.arrivals), default=0.0)
        last_ms = max([last_ms, *(t.at_ms + t.for_ms for t in setup.troubles)])
        async with trio.open_nursery() as nursery:
            supervisor = LawfulSupervisor(config, SimulatedRanks(self), self.laws)
            leader = await nursery.start(supervisor.run)
            with trio.move_on_after(last_ms / 1e3 + ENDS_WITHIN_S) as limit:
                async with trio.open_nursery() as events:
                    for arrival in setup.arrivals:
                        events.start_soon(self._arrive, leader, arrival)
                    for trouble in setup.troubles:
                        events.start_soon(self._strike, trouble)
                    for at_ms in setup.asked_ms:
                        events.start_soon(self._ask, supervisor, at_ms)
                await self._wait_over(supervisor, leader)
            if limit.cancelled_caught:
                self.laws.note(Law.STALL, self._stalled(leader))
            self._judge(supervisor, leader)
            supervisor.close()
            nursery.cancel_scope.cancel()
        return leader.planner.statistics(), supervisor.restarts, trio.current_time()

    async def _arrive(self, leader: Leader, arrival: Arrival) -> None:
        await trio.sleep_until(arrival.at_ms / 1e3)
        choices = [
            LegibleChoice(request, self._said[request.seq], arrival.stop)
            for request in arrival.requests
        ]
        asked: Any = list(zip(arrival.requests, choices, strict=True))
        room = leader.planner.waiting_free
        try:
            leader.add(asked)
        except RequestError as error:
            self._refused += 1
            full = error.status == 429 and room < len(choices)
            self.laws.require(Law.END, full, f"refused with room for {room}: {error}")
            return
        self._choices += choices
        if arrival.abort_ms is not None:
            await trio.sleep_until(arrival.abort_ms / 1e3)
            seqs = [choice.seq for choice in choices]
            self._aborted.update(seqs)
            leader.abort(seqs)

    async def _wait_over(self, supervisor: Supervisor, leader: Leader) -> None:
        """Until nobody waits for anything, and the ranks are there."""
        while supervisor.state is not State.FAILED:
            if self.start is None:
                await self.started.wait()
            elif leader.busy or leader.awaited:
                await leader.wait_progress()
            else:
                return

    async def _strike(self, trouble: Trouble) -> None:
        await trio.sleep_until(trouble.at_ms / 1e3)
        while self.start is None:
            await self.started.wait()
        start = self.start
        self.n_struck += trouble.kind in BREAKING
        start.strike(trouble)
        if trouble.kind == "crash":
            with trio.move_on_after(NOTICED_WITHIN_S):
                await start.ended.wait()
            noticed = start.ended.is_set()
            self.laws.require(Law.RESTARTS, noticed, f"nobody misses rank {trouble.rank}")

    async def _ask(self, supervisor: Supervisor, at_ms: float) -> None:
        """As a doctor would: every rank says what it is at, in the middle of a step too."""
        await trio.sleep_until(at_ms / 1e3)
        start, ranks = self.start, supervisor.ranks
        if start is None or ranks is None:
            return
        states = await ranks.plane.ask_states(ANSWERS_WITHIN_S)
        if start.n_struck or start.ended.is_set():
            return
        world = self.part.grid.world
        self.laws.require(
            Law.ANSWERS,
            [state.rank for state in states] == list(range(world)),
            f"{len(states)} of {world} ranks said what they are at",
        )

    def _planned(self, plan: StepPlan) -> None:
        self._hash.update(encode(plan) + repr(trio.current_time()).encode())
        self.n_in_flight_max = max(self.n_in_flight_max, 1 + len(self.laws.log.in_flight))

    def _reported(self, report: StepReport) -> None:
        self._hash.update(encode(report) + repr(trio.current_time()).encode())
        self._accepted += sum(max(0, len(result.tokens) - 1) for result in report.results)

    def _stalled(self, leader: Leader) -> str:
        waiting = [choice.seq for choice in self._choices if not choice.ended]
        at = {rank: stage.replica.step for rank, stage in self.stages.items()}
        return f"sequences {waiting} go nowhere; in flight {list(leader.awaited)}, ranks at {at}"

    def _judge(self, supervisor: Supervisor, leader: Leader) -> None:
        """The laws of the end."""
        laws = self.laws
        for choice in self._choices:
            choice.judge(laws, choice.seq in self._aborted)
        laws.require(
            Law.RESTARTS,
            supervisor.restarts <= self.n_struck,
            f"{supervisor.restarts} restarts after {self.n_struck} troubles: {supervisor.reason}",
        )
        if laws.broken is not None:
            return
        planner = leader.planner
        statistics = planner.statistics()
        held = (statistics.running, statistics.waiting, statistics.kv_pages_used)
        laws.require(Law.IDLE, held == (0, 0, 0), f"running, waiting, pages used: {held}")
        # What is over but not told yet goes with the next plan, which nobody needs.
        untold = set(planner._outbox._drops)
        for rank, stage in self.stages.items():
            left = stage.replica.sequences.keys() - untold
            laws.require(Law.IDLE, not left, f"rank {rank} still has sequences {sorted(left)}")
        flushed = planner.flush_cache()
        laws.require(Law.IDLE, flushed, "pages stay in the cache, locked by nobody")


class LawfulSupervisor(Supervisor):
    """The real one; its planner is watched, and what the leader dies of is written down."""

    def __init__(self, config: Config, placement: Any, laws: Laws) -> None:
        super().__init__(config, placement)
        self._laws = laws

    def _lead(self, pages_total: int) -> Leader:
        leader = super()._lead(pages_total)
        self._laws.watch(leader.planner)
        return leader

    def _broke(self, error: Exception) -> None:
        if not isinstance(error, CURABLE):
            self._laws.died("the leader", error)
        super()._broke(error)


class SimulatedRanks:
    """A placement: every start has new ranks, new planes and the troubles of its time."""

    def __init__(self, world: World) -> None:
        self.known: Any = Known("legible", CONTEXT_LEN, world.setup.shape.vocab, None)  # type: ignore[arg-type]
        self._world = world

    @asynccontextmanager
    async def open_ranks(self, pages_total: int | None) -> AsyncIterator[Ranks]:
        world, grid = self._world, self._world.part.grid
        start = Start(world.setup, world.random)
        layers = open_inline_planes(grid, limit_s=PLANE_S)
        in_flight_max = world.setup.depth.in_flight_max
        await trio.sleep(0.001)  # nothing starts at once
        async with (
            open_request_plane(grid.world, in_flight_max, encoded=True, link=start.cross) as (
                leader_end,
                followers,
            ),
            open_hidden_plane(grid, in_flight_max, limit_s=PLANE_S, link=start.cross) as hiddens,
            trio.open_nursery() as nursery,
        ):
            world.stages = {}
            for rank in range(grid.world):
                stage = LegibleStage(rank, world.part, layers[rank], world.guess)
                world.stages[rank] = stage
                rank_task = _Rank(world, start, stage, layers[rank])
                run = partial(rank_task.run, followers[rank], hiddens[rank])
                nursery.start_soon(_guarded, rank, run, layers)
            world.start = start
            world.started.set()
            try:
                yield Ranks(leader_end, world.setup.pages_total)
            finally:
                world.start, world.started = None, trio.Event()
                start.ended.set()
                nursery.cancel_scope.cancel()


async def _guarded(rank: int, run: Any, layers: dict[int, LayerEnd]) -> None:
    try:
        await run_as_rank(rank, run)
    finally:
        for layer in layers.values():
            layer.abort(f"rank {rank} is gone")


class _Rank:
    """One rank's task. What it dies of without having been told to is a broken law."""

    def __init__(self, world: World, start: Start, stage: LegibleStage, layer: LayerEnd) -> None:
        self._world = world
        self._start = start
        self._stage = stage
        self._layer = layer

    async def run(self, follower: FollowerEnd, hidden: MemoryEnd) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._crash)
            async with follower, hidden:
                await self._obey(follower, hidden)
            nursery.cancel_scope.cancel()

    async def _crash(self) -> None:
        await self._start.crashes[self._stage.rank].wait()
        raise PlannedCrash(f"rank {self._stage.rank} was told to die")

    async def _obey(self, follower: FollowerEnd, hidden: MemoryEnd) -> None:
        watch = Watch()
        follower.state = partial(state_of, follower.rank, watch, self._stage, self._layer)
        try:
            await run_rank(self._stage, follower, hidden, self._compute, watch)
        except Exception as error:
            broke = isinstance(error, UNMET) and not isinstance(error, PlaneMismatch)
            if not (broke and self._start.n_struck):
                self._world.laws.died(f"rank {self._stage.rank}", error)
            raise

    async def _compute(self, function: Any, work: Work, inward: Any) -> Any:
        await self._start.work(self._stage.rank, work.micros)
        return await compute_inline(function, work, inward)


@contextmanager
def repeatable(seed: int) -> Iterator[None]:
    """Trio runs tasks that are ready at once in an order that the seed decides."""
    before = trio_run._ALLOW_DETERMINISTIC_SCHEDULING, trio_run._r.getstate()
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    trio_run._r.seed(seed)
    try:
        yield
    finally:
        trio_run._ALLOW_DETERMINISTIC_SCHEDULING = before[0]  # type: ignore[misc]
        trio_run._r.setstate(before[1])


@contextmanager
def quiet() -> Iterator[None]:
    """Restarts are what a simulation is for, and no news."""
    logger = logging.getLogger("aserve.engine")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
