"""The request plane of one process over links that a simulator delays and cuts."""

import pytest
import trio
import trio.testing

from aserve.errors import PeerError, RankDied
from aserve.planes.request_memory import open_request_plane
from aserve.wire.link import Hop
from tests.planes.test_request import plan, report


async def test_what_is_under_way_when_the_other_direction_is_cut_is_lost(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def cut(hop: Hop) -> None:
        if hop == Hop("request", 0, -1):
            raise PeerError(str(hop), "was cut")
        await trio.sleep(1)

    async with open_request_plane(1, 2, link=cut) as (leader, followers):
        leader.send_nowait(plan(0))
        leader.send_nowait(plan(1))
        await followers[0].plans.receive()
        followers[0].report_nowait(report(0, 0))
        with pytest.raises(PeerError, match="was cut"):
            await followers[0].plans.receive()
        await trio.sleep(5)  # the second plan arrives where nobody is
        with pytest.raises(RankDied, match="was cut"):
            await leader.reports.receive()
