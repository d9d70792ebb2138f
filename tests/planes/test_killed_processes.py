"""A process that is killed or stopped is noticed by the other end of every plane, within a second.

What lives in the other process is `aserve.testing.far_end`.
"""

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from aserve.core.message import RankState, StepPlan
from aserve.errors import PeerError, PlaneTimeout, RankDied
from aserve.planes.hidden import HiddenEnd
from aserve.planes.hidden_bundle import Neighbours
from aserve.planes.hidden_stream import open_hidden_listener, open_stream_hidden
from aserve.planes.hidden_torch import open_torch_hidden
from aserve.planes.request_stream import open_follower, open_leader
from aserve.testing.far_end import HIDDEN_TERMS, TERMS
from aserve.testing.pairs import GRID, bundle_of, file_store, shapes_of_size
from aserve.wire.address import Address, Unix, parse_address

pytestmark = pytest.mark.slow

LIMIT_S, NOTICED_S = 30.0, 1.0


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, folder: str) -> Address:
    return parse_address(f"unix:{folder}/a.sock" if request.param == "unix" else "tcp:127.0.0.1:0")


@asynccontextmanager
async def far_end(kind: str, where: str) -> AsyncIterator[trio.Process]:
    command = [sys.executable, "-m", "aserve.testing.far_end", kind, where]
    async with trio.open_nursery() as nursery:

        async def run(task_status: trio.TaskStatus[trio.Process]) -> None:
            await trio.run_process(command, check=False, task_status=task_status)

        yield await nursery.start(run)
        nursery.cancel_scope.cancel()


async def test_a_killed_rank(address: Address) -> None:
    async with (
        open_leader(address, TERMS) as leader,
        far_end("follower", str(leader.address)) as process,
    ):
        await leader.wait_ready(LIMIT_S)
        leader.send_nowait(StepPlan(0, 0, (), (), (), (), (), ()))
        assert (await leader.reports.receive()).step == 0
        process.kill()
        with trio.fail_after(NOTICED_S), pytest.raises(RankDied, match="rank 0 died: its connect"):
            await leader.reports.receive()


async def test_a_stopped_rank_is_found_by_the_watch(address: Address) -> None:
    async with (
        open_leader(address, TERMS) as leader,
        far_end("follower", str(leader.address)) as process,
    ):
        await leader.wait_ready(LIMIT_S)
        assert await leader.ask_states(LIMIT_S) == (RankState(0, 1, 2, doing="as it was told"),)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PlaneTimeout, match=r"rank 0 said nothing for 0\.3 s"):
            await leader.watch(0.3)
        process.kill()


async def test_a_killed_leader(folder: str) -> None:
    address = f"unix:{folder}/a.sock"
    async with (
        far_end("leader", address) as process,
        open_follower(Unix(f"{folder}/a.sock"), TERMS, 0, limit_s=LIMIT_S) as follower,
    ):
        assert [(await follower.plans.receive()).step for _ in range(2)] == [0, 1]
        process.kill()
        with trio.fail_after(NOTICED_S):
            assert await follower.wait_closed() == "its connection ended without a word"
            with pytest.raises(PeerError, match="the leader: its connection ended"):
                await follower.plans.receive()


async def receive_until_killed(end: HiddenEnd, process: trio.Process) -> None:
    """What was sent before the death is there; then who waits hears of it."""
    for step in range(2):
        bundle = await end.receive(step, shapes_of_size(1000))
        assert bundle["hidden"].equal(bundle_of(step, 1000)["hidden"])

    async def wait() -> None:
        with pytest.raises(RankDied, match="rank 0 died: "):
            await end.receive(2, shapes_of_size(1000))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked(0.01)
        process.kill()
        nursery.cancel_scope.deadline = trio.current_time() + NOTICED_S
    assert not nursery.cancel_scope.cancelled_caught, "it was not noticed"


async def test_a_killed_stage_before(address: Address) -> None:
    beside = Neighbours.of(GRID, 1)
    async with (
        open_hidden_listener(address, HIDDEN_TERMS, beside) as listener,
        far_end("hidden", str(listener.address)) as process,
        open_stream_hidden(
            beside, HIDDEN_TERMS, listener=listener, following=None, limit_s=LIMIT_S
        ) as end,
    ):
        await receive_until_killed(end, process)


async def test_a_killed_stage_before_over_torch_distributed(folder: str) -> None:
    async with (
        far_end("hidden_torch", folder) as process,
        open_torch_hidden(
            Neighbours.of(GRID, 1),
            file_store(folder),
            in_flight_max=2,
            limit_s=LIMIT_S,
            host="127.0.0.1",
        ) as end,
    ):
        await receive_until_killed(end, process)
