"""A rank's loop. There is one; what a rank does is in the plans."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from aserve.core.message import RankState, StepPlan, StepReport

IDLE = "waiting for a plan"

Work = TypeVar("Work")
Outward = TypeVar("Outward")


class RankRunner(Protocol[Work, Outward]):
    """What the loop needs of a runner (aserve.runner.runner.Runner, or a stand-in).

    On a grid of several stages a `Work` also has `step` and `inward` (name -> shape and dtype of
    what comes from the stage before), an `Outward` has `bundle` (what goes to the next).
    """

    def apply(self, plan: StepPlan) -> Work: ...
    def forward(self, work: Work, inward: Any) -> Outward: ...
    def report(self, plan: StepPlan, outward: Outward) -> StepReport: ...


class Follower(Protocol):
    """A rank's end of the request plane (aserve.planes.request.FollowerEnd)."""

    @property
    def plans(self) -> Any: ...
    async def report(self, report: StepReport) -> None: ...


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


async def run_rank(
    runner: RankRunner[Work, Outward],
    plane: Follower,
    hidden: Hidden,
    compute: Callable[..., Awaitable[Outward]],
    watch: Watch | None = None,
) -> None:
    """Obey plans until there are no more."""
    watch = watch or Watch()
    watch.now(IDLE)
    reported_at = trio.current_time()
    async for plan in plane.plans:
        watch.step = plan.step
        work: Any = runner.apply(plan)
        inward = None
        if hidden.has_previous:
            watch.now("waiting for the stage before")
            inward = await hidden.receive(work.step, work.inward)
        waited_s = trio.current_time() - reported_at
        watch.now("computing")
        outward: Any = await compute(runner.forward, work, inward)
        if hidden.has_next:
            watch.now("sending to the next stage")
            await hidden.send(work.step, outward.bundle)
        watch.now("reporting")
        report = runner.report(plan, outward)
        watch.digest = report.digest
        watch.waited_micros = round(waited_s * 1e6)
        await plane.report(msgspec.structs.replace(report, waited_micros=watch.waited_micros))
        reported_at = trio.current_time()
        watch.now(IDLE)
    await trio.lowlevel.checkpoint()


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
