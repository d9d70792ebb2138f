"""The request plane: plans go down, reports come up. The two ends, whatever carries them.

A leader's end cannot report and a follower's cannot plan, by type. Nothing here waits to send: at
most `in_flight_max` plans are unanswered, so every queue has room, which is asserted on this side
and checked on the other. How messages travel: `request_memory` and `request_stream`.
"""

from collections.abc import Callable, Collection
from types import TracebackType
from typing import TypeAlias

import trio

from aserve.core.codec import Down, Up
from aserve.core.message import (
    AskState,
    Bye,
    End,
    RankState,
    Ready,
    Setup,
    StepPlan,
    StepReport,
)
from aserve.errors import PeerError, PlaneError, PlaneTimeout, RankDied
from aserve.wire.address import Address

SETUPS_MAX = 4
# Beside plans or reports a direction carries at most: setups and one question, an end; or a ready,
# an answer, a bye.
CONTROLS_MAX = SETUPS_MAX + 2
LEAVE_S = 2.0  # for the followers to leave after the leader's end

SendDown: TypeAlias = Callable[[Down, Collection[int]], None]
SendUp: TypeAlias = Callable[[Up], None]


class Reports(trio.abc.ReceiveChannel[StepReport]):
    """Any rank's report, in the order of arrival; each rank's are in the order of its plans."""

    def __init__(self, reports_max: int) -> None:
        self._sender, self._receiver = trio.open_memory_channel[StepReport](reports_max)
        self._error: Callable[[], PlaneError] | None = None
        self._ended = False

    async def receive(self) -> StepReport:
        """Raises RankDied once a rank is gone and what came before is received; from then on
        always. EndOfChannel after the leader closed."""
        try:
            return await self._receiver.receive()
        except trio.EndOfChannel:
            if self._error is not None:
                raise self._error() from None
            raise

    def add(self, report: StepReport) -> None:
        """What comes after the end is nobody's news."""
        if not self._ended:
            self._sender.send_nowait(report)

    def end(self, error: Callable[[], PlaneError] | None) -> None:
        """No more reports; only the first end counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._sender.close()

    async def aclose(self) -> None:
        self._receiver.close()
        await trio.lowlevel.checkpoint()


class _Follower:
    """What the leader knows of a rank."""

    __slots__ = ("answers", "asked", "here", "ready", "state", "unreported")

    def __init__(self) -> None:
        self.here = False
        self.ready: Ready | None = None
        self.state: RankState | None = None
        self.answers = 0  # how many states came
        self.asked = False  # one question at a time
        self.unreported = 0  # plans sent and not reported on


class LeaderEnd:
    """Sends each plan to all ranks; receives their reports, states and last words."""

    def __init__(self, world: int, in_flight_max: int, send: SendDown, address: Address) -> None:
        assert world >= 1, world
        assert in_flight_max >= 1, in_flight_max
        self.address = address
        self.reports = Reports(world * in_flight_max)
        self._in_flight_max = in_flight_max
        self._send = send
        self._followers = [_Follower() for _ in range(world)]
        self._gone: dict[int, str] = {}  # rank -> why
        self._closed = False
        self._news = trio.Event()

    def send_nowait(self, plan: StepPlan) -> None:
        """To every rank. A dead one is told of by `reports`, not here."""
        assert not self._closed, "a plan after the end"
        for follower in self._followers:
            assert follower.here or self._gone, "a plan before all ranks are there"
            assert follower.unreported < self._in_flight_max or self._gone, "too many plans"
            follower.unreported += 1
        self._send(plan, self.living())

    def send_setup(self, setup: Setup) -> None:
        """To every rank, at most SETUPS_MAX times, after `wait_joined`."""
        assert all(follower.here for follower in self._followers) or self._gone
        self._send(setup, self.living())

    async def wait_joined(self, limit_s: float) -> None:
        """Until every rank has connected. Raises PlaneTimeout naming who has not, RankDied."""
        await self._wait_all(lambda follower: follower.here, limit_s, "have not joined")

    async def wait_ready(self, limit_s: float) -> tuple[Ready, ...]:
        """What every rank said of itself, in rank order. Raises PlaneTimeout naming who has not
        answered, RankDied if one died meanwhile."""
        await self._wait_all(lambda rank: rank.ready is not None, limit_s, "are not ready")
        return tuple(follower.ready for follower in self._followers if follower.ready is not None)

    async def ask_states(self, limit_s: float) -> tuple[RankState, ...]:
        """What the ranks are doing now; who does not answer within `limit_s` is not among them."""
        before = {rank: self._followers[rank].answers for rank in self.living()}
        ask = [rank for rank in before if not self._followers[rank].asked]
        for rank in ask:
            self._followers[rank].asked = True
        self._send(AskState(), ask)

        def missing() -> bool:
            living = set(self.living())
            return any(self._followers[r].answers == n for r, n in before.items() if r in living)

        with trio.move_on_after(limit_s):
            while missing():
                await self._news.wait()
        await trio.lowlevel.checkpoint()
        found = (self._followers[r] for r, n in before.items() if self._followers[r].answers > n)
        return tuple(follower.state for follower in found if follower.state is not None)

    async def watch(self, limit_s: float) -> None:
        """Ask every rank again and again; raises PlaneTimeout naming those that said nothing for
        `limit_s`, though they are connected: stopped, or never giving way to their other tasks."""
        while not self._gone and not self._closed:
            asked = self.living()
            answered = {state.rank for state in await self.ask_states(limit_s)}
            silent = [rank for rank in asked if rank not in answered and rank not in self._gone]
            if silent and not self._closed:
                raise PlaneTimeout(silent, f"{_names(silent)} said nothing for {limit_s:g} s")
            await trio.sleep(limit_s / 2)

    def rank_died(self, rank: int, why: str) -> None:
        """Whoever sees it first says so: a connection, or who watches the rank's process."""
        if rank in self._gone:
            return
        self._gone[rank] = why
        if not self._closed:
            self.reports.end(lambda: RankDied(rank, why))
        self._tell()

    def check(self) -> None:
        """Raises RankDied if a rank is gone."""
        for rank, why in self._gone.items():
            raise RankDied(rank, why)

    def close(self) -> None:
        """There are no more plans: the followers' end too."""
        if self._closed:
            return
        self._closed = True
        self._send(End(), self.living())
        self.reports.end(None)
        self._tell()

    async def wait_left(self, limit_s: float) -> None:
        """After `close`: until every rank that was there has left, at most `limit_s`."""
        with trio.move_on_after(limit_s):
            while self.living():
                await self._news.wait()

    def join(self, rank: int) -> None:
        """For what carries the plane: a rank is reachable."""
        self._followers[rank].here = True
        self._tell()

    def take(self, rank: int, message: Up) -> None:
        """For what carries the plane: a rank said this."""
        if rank in self._gone:
            return
        follower = self._followers[rank]
        if isinstance(message, Bye):
            self.rank_died(rank, message.error or "it left")
        elif message.rank != rank:
            self.rank_died(rank, f"it speaks as rank {message.rank}")
        elif isinstance(message, StepReport):
            self._take_report(follower, message)
        elif isinstance(message, Ready):
            follower.ready = message
        else:
            follower.state, follower.asked = message, False
            follower.answers += 1
        self._tell()

    def _take_report(self, follower: _Follower, report: StepReport) -> None:
        if follower.unreported == 0:
            self.rank_died(report.rank, f"it reported on step {report.step}, which it was not sent")
            return
        follower.unreported -= 1
        self.reports.add(report)

    def living(self) -> tuple[int, ...]:
        """Ranks that are there and not gone."""
        followers = enumerate(self._followers)
        return tuple(rank for rank, one in followers if one.here and rank not in self._gone)

    async def _wait_all(
        self, there: Callable[[_Follower], bool], limit_s: float, failing: str
    ) -> None:
        with trio.move_on_after(limit_s):
            while not all(there(follower) for follower in self._followers):
                for rank, why in self._gone.items():
                    raise RankDied(rank, why)
                await self._news.wait()
            await trio.lowlevel.checkpoint()
            return
        missing = [rank for rank, one in enumerate(self._followers) if not there(one)]
        raise PlaneTimeout(missing, f"{_names(missing)} {failing} after {limit_s:g} s")

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()


class Plans(trio.abc.ReceiveChannel[StepPlan]):
    """The plans, in order; ends where the leader ended."""

    def __init__(self, in_flight_max: int) -> None:
        self._sender, self._receiver = trio.open_memory_channel[StepPlan](in_flight_max)
        self.lost: str | None = None  # why the leader is gone without an end

    async def receive(self) -> StepPlan:
        """Raises EndOfChannel after the leader's end, PeerError where it was lost without one."""
        try:
            return await self._receiver.receive()
        except trio.EndOfChannel:
            if self.lost is not None:
                raise PeerError("the leader", self.lost) from None
            raise

    def add(self, plan: StepPlan) -> None:
        """Raises trio.WouldBlock if the leader sends more than was agreed."""
        self._sender.send_nowait(plan)

    def end(self) -> None:
        self._sender.close()

    async def aclose(self) -> None:
        self._receiver.close()
        await trio.lowlevel.checkpoint()


class FollowerEnd:
    """Receives plans, in order, and reports on each.

    As a context manager it says at its end that this rank has left, and of what it died if so.
    """

    def __init__(self, rank: int, in_flight_max: int, send: SendUp) -> None:
        self.rank = rank
        self.plans = Plans(in_flight_max)
        # Asked for a RankState at any time, in the middle of a step too; replace it.
        self.state: Callable[[], RankState] = lambda: RankState(rank, -1, 0)
        self._send = send
        self._setups, self._setup = trio.open_memory_channel[Setup](SETUPS_MAX)
        self._unreported = 0
        self._left = False
        self._closed = trio.Event()

    def report_nowait(self, report: StepReport) -> None:
        """There is room. A leader that is gone is told of by `plans`, not here."""
        assert self._unreported > 0, "a report without a plan"
        assert report.rank == self.rank, (report.rank, self.rank)
        self._unreported -= 1
        self._say(report)

    async def ready(self, ready: Ready) -> None:
        assert ready.rank == self.rank, (ready.rank, self.rank)
        await trio.lowlevel.checkpoint()
        self._say(ready)

    async def wait_setup(self) -> Setup:
        """The next of the leader's setups. Raises PeerError where the leader is gone."""
        try:
            return await self._setup.receive()
        except trio.EndOfChannel:
            raise PeerError("the leader", self.plans.lost or "it ended the plane") from None

    async def wait_closed(self) -> str:
        """Until the leader has ended the plane or was lost; returns which. Whoever waits for a
        peer in another plane need wait no longer."""
        await self._closed.wait()
        return self.plans.lost or "the leader ended the plane"

    def leave(self, error: str = "") -> None:
        """The rank's last word."""
        if not self._left:
            self._say(Bye(error))
            self._left = True

    def take(self, message: Down) -> None:
        """For what carries the plane: the leader said this. Raises PeerError if it may not."""
        try:
            if isinstance(message, StepPlan):
                self.plans.add(message)
                self._unreported += 1
            elif isinstance(message, Setup):
                self._setups.send_nowait(message)
            elif isinstance(message, AskState):
                self._say(self.state())
            else:
                self._end()
        except trio.WouldBlock:
            raise PeerError("the leader", "it sends more than this rank can hold") from None

    def leader_lost(self, why: str) -> None:
        """For what carries the plane: the leader is gone."""
        if not self._closed.is_set():
            self.plans.lost = why
            self._end()

    def _end(self) -> None:
        self.plans.end()
        self._setups.close()
        self._closed.set()

    def _say(self, message: Up) -> None:
        if not self._left:
            self._send(message)

    async def __aenter__(self) -> "FollowerEnd":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(last_words(error))


def last_words(error: BaseException | None) -> str:
    """What a rank says it died of; a group of one error is that error."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if error is None:
        return ""
    if isinstance(error, trio.Cancelled):
        return "it was cancelled"
    return f"{type(error).__name__}: {error}"


def _names(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
