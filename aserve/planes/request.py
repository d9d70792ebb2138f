"""The request plane: plans go down, reports come up. In one process both travel as structs.

A leader's end cannot report and a follower's cannot plan, by type.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from aserve.core.message import StepPlan, StepReport


class LeaderEnd:
    """Sends each plan once and receives the reports in the order of the plans."""

    def __init__(
        self,
        plans: trio.MemorySendChannel[StepPlan],
        reports: trio.MemoryReceiveChannel[StepReport],
    ) -> None:
        self._plans = plans
        self.reports = reports

    def send_nowait(self, plan: StepPlan) -> None:
        """Room is certain: the planner keeps no more plans unanswered than the channel holds.

        Raises trio.BrokenResourceError when the follower is gone.
        """
        self._plans.send_nowait(plan)


class FollowerEnd:
    """Receives plans, in order, and reports on each."""

    def __init__(
        self,
        plans: trio.MemoryReceiveChannel[StepPlan],
        reports: trio.MemorySendChannel[StepReport],
    ) -> None:
        self.plans = plans
        self._reports = reports

    async def report(self, report: StepReport) -> None:
        """Raises trio.BrokenResourceError when the leader is gone."""
        await self._reports.send(report)


@asynccontextmanager
async def open_request_plane(
    in_flight_max: int = 1,
) -> AsyncIterator[tuple[LeaderEnd, FollowerEnd]]:
    """Both ends of a plane on which at most `in_flight_max` plans await their reports."""
    plans_in, plans_out = trio.open_memory_channel[StepPlan](in_flight_max)
    reports_in, reports_out = trio.open_memory_channel[StepReport](in_flight_max)
    with plans_in, plans_out, reports_in, reports_out:
        yield LeaderEnd(plans_in, reports_out), FollowerEnd(plans_out, reports_in)
