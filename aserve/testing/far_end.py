"""One end of a plane in a process of its own, to be killed: `python -m aserve.testing.far_end`.

    follower ADDRESS         rank 0 of a grid of one: reports on each plan
    leader ADDRESS           of a grid of one: sends two plans
    hidden ADDRESS           the first of two stages: sends steps 0 and 1
    hidden_torch FOLDER      the same over torch.distributed, its store a file there

Each then stays until it is ended from outside.
"""

import sys

import trio

from aserve.core.message import RankState, Ready, StepPlan, StepReport
from aserve.planes.request_stream import open_follower, open_leader
from aserve.planes.terms import Terms
from aserve.wire.address import parse_address

SECRET = b"known to both of us"
TERMS = Terms(1, 2, SECRET)
HIDDEN_TERMS = Terms(2, 2, SECRET)
LIMIT_S = 20.0


async def follow(address: str) -> None:
    async with open_follower(parse_address(address), TERMS, 0, limit_s=LIMIT_S) as end:
        end.state = lambda: RankState(0, 1, 2, doing="as it was told")
        await end.ready(Ready(0, 7, "far", 1, ""))
        async for plan in end.plans:
            end.report_nowait(StepReport(plan.step, 0, 0, (), (), (), 0))


async def lead(address: str) -> None:
    async with open_leader(parse_address(address), TERMS) as end:
        await end.wait_joined(LIMIT_S)
        for step in range(2):
            end.send_nowait(StepPlan(step, 0, (), (), (), (), (), ()))
        await trio.sleep_forever()


async def send_hidden(address: str) -> None:
    from aserve.planes.hidden_bundle import Neighbours
    from aserve.planes.hidden_stream import open_stream_hidden
    from aserve.testing.pairs import GRID, bundle_of

    async with open_stream_hidden(
        Neighbours.of(GRID, 0),
        HIDDEN_TERMS,
        listener=None,
        following=parse_address(address),
        limit_s=LIMIT_S,
    ) as end:
        for step in range(2):
            await end.send(step, bundle_of(step, 1000))
        await trio.sleep_forever()


async def send_hidden_torch(folder: str) -> None:
    from aserve.planes.hidden_bundle import Neighbours
    from aserve.planes.hidden_torch import open_torch_hidden
    from aserve.testing.pairs import GRID, bundle_of, file_store

    async with open_torch_hidden(
        Neighbours.of(GRID, 0),
        file_store(folder),
        in_flight_max=2,
        limit_s=LIMIT_S,
        host="127.0.0.1",
    ) as end:
        for step in range(2):
            await end.send(step, bundle_of(step, 1000))
        await trio.sleep_forever()


KINDS = {
    "follower": follow,
    "leader": lead,
    "hidden": send_hidden,
    "hidden_torch": send_hidden_torch,
}

if __name__ == "__main__":
    trio.run(KINDS[sys.argv[1]], sys.argv[2])
