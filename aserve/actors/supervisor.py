"""Keeps a grid of ranks serving under one leader: starts it, and starts it anew when it breaks.

What a restart loses is KV, not tokens: the leader holds every token given out, the planner plans
them again, and as noise is keyed by position the text goes on as it would have.
"""

import logging
from functools import partial

import trio

from aserve.actors.launch import cause_of_end
from aserve.actors.leader import Leader
from aserve.actors.placement import Placement, Ranks, in_flight_max
from aserve.actors.supervision import Blame, Event, State, step
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.core.planner import CacheSpec, Planner
from aserve.core.speculation import speculation_of
from aserve.errors import ConfigError, Desync, PeerError, PlaneError

logger = logging.getLogger("aserve.engine")

ENDING_S = 10.0  # beyond ranks.plane_s, for ranks that broke to be gone

# What new ranks can cure. All else is a fault of the leader's own, which would only come again.
CURABLE = (
    Desync,
    PeerError,
    PlaneError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    trio.EndOfChannel,
    OSError,
)


class Supervisor:
    """`run` it in a nursery with `start`, which returns once the first ranks serve."""

    leader: Leader

    def __init__(self, config: Config, placement: Placement) -> None:
        self.state = State.STARTING
        self.reason: str | None = None  # of the last break
        self.restarts = 0
        self.ranks: Ranks | None = None  # while they serve
        self._config = config
        self._placement = placement
        self._blame = Blame(config.ranks.restarts_max)
        self._pages_total: int | None = None

    async def run(self, *, task_status: trio.TaskStatus[Leader] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. Raises what the first start raised: nobody has asked for anything yet,
        and whoever starts us wants to know."""
        while self.state is not State.FAILED:
            error = await cause_of_end(partial(self._serve, task_status))
            if self.state in (State.CLOSED, State.FAILED):
                break
            assert error is not None, "a leader serves until something breaks"
            if self.state is State.STARTING:
                self._to(Event.GAVE_UP)
                raise error
            self._broke(error)
        await trio.sleep_forever()

    async def _serve(self, task_status: trio.TaskStatus[Leader]) -> None:
        """One start of the ranks."""
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_ending, over)
            async with self._placement.open_ranks(self._pages_total) as ranks:
                first = self.state is State.STARTING
                if first:
                    self.leader = self._lead(ranks.pages_total)
                    self._pages_total = ranks.pages_total
                self.ranks = ranks
                self._to(Event.STARTED)
                if first:
                    task_status.started(self.leader)
                else:
                    logger.info("the ranks serve again")
                reason = None  # cancelled with the ranks: why is known when they are gone
                try:
                    error = await cause_of_end(partial(self._run_leader, ranks))
                    assert error is not None, "a leader serves until something breaks"
                    reason = sentence(error)
                    raise error
                finally:
                    self.ranks = None
                    if self.state is State.SERVING:
                        self.reason = reason  # not that of a break before, while ranks are ended
                        self._to(Event.BROKE)
                    over.set()

    async def _watch_ending(self, over: trio.Event) -> None:
        """A thread that computes for ever cannot be ended; whoever waits for it must hear so."""
        await over.wait()
        limit_s = self._config.ranks.plane_s + ENDING_S
        await trio.sleep(limit_s)
        if self.state is State.RESTARTING:
            self._give_up(f"the ranks broke and could not be ended within {limit_s:g} s")

    async def _run_leader(self, ranks: Ranks) -> None:
        async with trio.open_nursery() as nursery:
            if ranks.watch is not None:
                nursery.start_soon(ranks.watch)
            await self.leader.run(ranks.plane)

    def _lead(self, pages_total: int) -> Leader:
        config, grid = self._config, Grid(self._config.layout)
        size = config.cache.page_size
        planner = Planner(
            config.schedule,
            CacheSpec(size, pages_total, -(-config.cache.kept_tokens // size)),
            context_len=self._placement.known.context_len,
            layout=config.layout,
            speculation=speculation_of(config.spec),
            vocab_size=self._placement.known.vocab_size,
        )
        return Leader(planner, world=grid.world, in_flight_max=in_flight_max(config))

    def _to(self, event: Event) -> None:
        self.state = step(self.state, event)

    def _broke(self, error: Exception) -> None:
        """Everything of the ranks is gone. Decide what goes on, and without whom."""
        self.reason = sentence(error)
        leader = self.leader
        suspects = self._blame.broke(leader.in_flight(), leader.meters.generation_tokens)
        if isinstance(error, ConfigError):
            logger.error("the ranks cannot be started again: %s", error)
            self._give_up(f"the ranks cannot be started again: {error}")
            return
        if not isinstance(error, CURABLE):
            logger.error("the leader's loop died", exc_info=error)
            self._give_up(f"the leader's loop died: {self.reason}")
            return
        logger.error("the ranks broke: %s", self.reason)
        leader.reset()
        if suspects:
            count = self._config.ranks.restarts_max + 1
            logger.error("giving up %d sequences in the steps that broke", len(suspects))
            leader.give_up(
                suspects, f"the ranks broke {count} times computing this; last: {self.reason}"
            )
        if self._blame.hopeless:
            self._give_up(
                f"the ranks broke {self._blame.breaks} times without a token in between; last: "
                f"{self.reason}"
            )
            return
        self._to(Event.BROKE)
        self.restarts += 1
        logger.warning("starting the ranks again (restart %d)", self.restarts)

    def _give_up(self, why: str) -> None:
        self._to(Event.GAVE_UP)
        self.leader.fail(why)

    def close(self) -> None:
        """Nothing more will be computed; whoever runs this cancels it next."""
        if self.state is not State.CLOSED:
            self._to(Event.CLOSE)
            self.leader.close()

    async def dismiss(self) -> None:
        """After `close`: let ranks of other processes know that this was the end."""
        if self.ranks is not None and self.ranks.dismiss is not None:
            await self.ranks.dismiss()


def sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
