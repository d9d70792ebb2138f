"""A rank's loop. There is one; what a rank does is in the plans."""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import trio

from aserve.actors.launch import most_telling
from aserve.core.message import RankState, StepPlan, StepReport
from aserve.models.memory import Trimming

IDLE = "waiting for a plan"
TURNS_MAX = 2  # plans taken up at once: one is computed, the next one follows without a pause

Work = TypeVar("Work")
Outward = TypeVar("Outward")


class RankRunner(Protocol[Work, Outward]):
    """What the loop needs of a runner (aserve.runner.runner.Runner, or a stand-in).

    On a grid of several stages a `Work` also has `step` and `inward` (name -> shape and dtype of
    what comes from the stage before), an `Outward` has `bundle` (what goes to the next).
    """

    def apply(self, plan: StepPlan) -> Work:
        """May come while an earlier `forward` computes: the work brings what that one changes."""
        ...

    def forward(self, work: Work, inward: Any) -> Outward: ...
    def report(self, plan: StepPlan, outward: Outward) -> StepReport: ...


class Follower(Protocol):
    """A rank's end of the request plane (aserve.planes.request.FollowerEnd)."""

    @property
    def plans(self) -> Any: ...
    def report_nowait(self, report: StepReport) -> None: ...


class Hidden(Protocol):
    """A rank's end of the hidden plane (aserve.planes.hidden)."""

    @property
    def has_previous(self) -> bool: ...
    @property
    def has_next(self) -> bool: ...
    async def receive(self, step: int, shapes: Mapping[str, Any]) -> Mapping[str, Any]: ...
    async def send(self, step: int, bundle: Mapping[str, Any]) -> None: ...


class Watch:
    """What a rank is doing, for those who ask while it does it."""

    __slots__ = ("digest", "doing", "since", "step", "waited_micros")

    def __init__(self) -> None:
        self.step = -1  # of the last plan taken up
        self.digest = 0
        self.waited_micros = 0  # before the last report
        self.now("starting")

    def now(self, doing: str) -> None:
        self.doing = doing
        self.since = trio.current_time()

    def sentence(self) -> str:
        return f"{self.doing}, for {trio.current_time() - self.since:.1f} s"


class Later:
    """A job of a `compute` that begins nothing ahead: it begins when it is waited for."""

    def __init__(self, compute: Callable[..., Awaitable[Any]], *call: Any) -> None:
        self._compute = compute
        self._call = call

    async def wait(self, on_cancel: Callable[[], None]) -> Any:
        return await self._compute(*self._call)

    async def abandon(self) -> None:
        """It has not begun."""


class Turn(NamedTuple):
    """A plan that was taken up: what is computed for it, and how long the rank waited for it."""

    plan: StepPlan
    work: Any
    job: Any
    posted_at: float


async def run_rank(
    runner: RankRunner[Work, Outward],
    plane: Follower,
    hidden: Hidden,
    compute: Callable[..., Awaitable[Outward]],
    watch: Watch | None = None,
) -> None:
    """Obey plans until there are no more.

    A plan is taken up while the one before is computed, and goes to the compute thread at once:
    from step to step the thread waits for nobody. Where stages wait for each other, they take up
    one plan at a time.
    """
    rank = _Rank(runner, plane, hidden, compute, watch or Watch())
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rank.take_up)
            await rank.answer()
    except ExceptionGroup as group:
        raise most_telling(group) from None
    finally:
        await rank.abandon()


class _Rank:
    def __init__(
        self, runner: Any, plane: Follower, hidden: Hidden, compute: Any, watch: Watch
    ) -> None:
        self._runner = runner
        self._plane = plane
        self._hidden = hidden
        self._post: Callable[..., Any] = getattr(compute, "post", partial(Later, compute))
        self._watch = watch
        alone = not (hidden.has_previous or hidden.has_next)
        self._turns_max = TURNS_MAX if alone else 1
        self._turns: deque[Turn] = deque()  # in order; the first is computed
        self._n_unreported = 0  # of the plans taken up
        self._reported = trio.Event()
        self._news = trio.Event()  # of a turn, or of the end of plans
        self._ended = False
        self._failed = False
        self._trimming = Trimming()
        watch.now(IDLE)

    async def take_up(self) -> None:
        hidden, watch = self._hidden, self._watch
        async for plan in self._plane.plans:
            while self._n_unreported >= self._turns_max:
                self._reported = trio.Event()
                await self._reported.wait()
            self._n_unreported += 1
            watch.step = plan.step
            work: Any = self._runner.apply(plan)
            inward = None
            if hidden.has_previous:
                watch.now("waiting for the stage before")
                inward = await hidden.receive(work.step, work.inward)
            job = self._post(self._forward, work, inward)
            self._turns.append(Turn(plan, work, job, trio.current_time()))
            self._news.set()
        self._ended = True
        self._news.set()

    def _forward(self, work: Any, inward: Any) -> Any:
        """Where a step failed, or nobody waits for it, none of those behind it may meet peers."""
        if self._failed:
            return None
        try:
            outward = self._runner.forward(work, inward)
            self._trimming.now_and_then()
            return outward
        except BaseException:
            self._failed = True
            raise

    def _fail(self) -> None:
        self._failed = True

    async def answer(self) -> None:
        """Report on each plan that was taken up."""
        hidden, watch, runner = self._hidden, self._watch, self._runner
        reported_at = trio.current_time()
        while await self._wait_turn():
            turn = self._turns[0]
            watch.now("computing")
            outward = await turn.job.wait(self._fail)
            self._turns.popleft()
            if hidden.has_next:
                watch.now("sending to the next stage")
                await hidden.send(turn.work.step, outward.bundle)
            watch.now("reporting")
            report = runner.report(turn.plan, outward)
            watch.digest = report.digest
            waited_s = max(0.0, turn.posted_at - reported_at)
            watch.waited_micros = round(waited_s * 1e6)
            report = msgspec.structs.replace(report, waited_micros=watch.waited_micros)
            await trio.lowlevel.checkpoint_if_cancelled()  # the job was waited out
            self._plane.report_nowait(report)
            reported_at = trio.current_time()
            self._n_unreported -= 1
            self._reported.set()
            watch.now(IDLE)

    async def _wait_turn(self) -> bool:
        """Until there is one; False: there are no more."""
        while not self._turns and not self._ended:
            self._news = trio.Event()
            await self._news.wait()
        return bool(self._turns)

    async def abandon(self) -> None:
        """What was taken up and not computed never will be."""
        self._fail()
        with trio.CancelScope(shield=True):
            for turn in self._turns:
                await turn.job.abandon()


def state_of(rank: int, watch: Watch, runner: Any, layer: Any) -> RankState:
    """The answer of a rank to whoever asks what it is at."""
    return RankState(
        rank=rank,
        step=watch.step,
        digest=watch.digest,
        n_sequences=getattr(runner, "n_sequences", 0),
        doing=watch.sentence(),
        last_call=layer.last_call,
        waited_micros=watch.waited_micros,
    )
