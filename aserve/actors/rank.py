"""A rank's loop. There is one; what a rank does is in the plans."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import trio

from aserve.core.message import StepPlan, StepReport
from aserve.planes.hidden import OnlyStage
from aserve.planes.request import FollowerEnd

Work = TypeVar("Work")
Outward = TypeVar("Outward")


class RankRunner(Protocol[Work, Outward]):
    """What the loop needs of a runner (aserve.runner.runner.Runner, or a stand-in)."""

    def apply(self, plan: StepPlan) -> Work: ...
    def forward(self, work: Work, inward: None) -> Outward: ...
    def report(self, plan: StepPlan, outward: Outward) -> StepReport: ...


async def run_rank(
    runner: RankRunner[Work, Outward],
    plane: FollowerEnd,
    hidden: OnlyStage,
    compute: Callable[..., Awaitable[Outward]],
) -> None:
    """Obey plans until there are no more."""
    assert not hidden.has_previous
    assert not hidden.has_next
    async for plan in plane.plans:
        work = runner.apply(plan)
        outward = await compute(runner.forward, work, None)
        await plane.report(runner.report(plan, outward))
    await trio.lowlevel.checkpoint()
