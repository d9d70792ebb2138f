"""The request plane for several ranks: who is there, who is ready, what they do and die of."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import msgspec
import pytest
import trio
import trio.testing

from aserve.core.message import (
    Batch,
    RankState,
    Ready,
    Setup,
    StepPlan,
    StepReport,
)
from aserve.errors import PeerError, PlaneTimeout, RankDied
from aserve.planes.request import SETUPS_MAX, FollowerEnd, LeaderEnd, last_words
from aserve.planes.request_memory import open_request_plane
from aserve.planes.request_stream import open_follower, open_leader
from aserve.planes.terms import Terms
from aserve.wire.address import Tcp, Unix
from aserve.wire.connection import connect
from aserve.wire.hello import Refusal
from aserve.wire.link import Hop
from aserve.wire.listener import open_listener, open_socket_folder

WORLD, IN_FLIGHT_MAX, LIMIT_S = 3, 2, 10.0
TERMS = Terms(WORLD, IN_FLIGHT_MAX, b"known to all of us")

Ends = tuple[LeaderEnd, Sequence[FollowerEnd]]


Open = Callable[[], AbstractAsyncContextManager[Ends]]


@asynccontextmanager
async def over_memory() -> AsyncIterator[Ends]:
    async with open_request_plane(WORLD, IN_FLIGHT_MAX) as ends:
        yield ends


@asynccontextmanager
async def over_codec() -> AsyncIterator[Ends]:
    async with open_request_plane(WORLD, IN_FLIGHT_MAX, encoded=True) as ends:
        yield ends


@asynccontextmanager
async def over_tcp() -> AsyncIterator[Ends]:
    """Every rank in a task of its own leaves when it is told of the end."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        leader = await stack.enter_async_context(open_leader(Tcp("127.0.0.1", 0), TERMS))
        followers: dict[int, FollowerEnd] = {}

        async def follow(rank: int, task_status: trio.TaskStatus[None]) -> None:
            async with open_follower(leader.address, TERMS, rank, limit_s=LIMIT_S) as end:
                followers[rank] = end
                task_status.started()
                await end.wait_closed()

        for rank in reversed(range(WORLD)):
            await nursery.start(follow, rank)
        yield leader, [followers[rank] for rank in range(WORLD)]


@pytest.fixture(params=[over_memory, over_codec, over_tcp])
def opened(request: pytest.FixtureRequest) -> Open:
    return request.param  # type: ignore[no-any-return]


def plan(step: int) -> StepPlan:
    return StepPlan(step, step % 2, (), (), (), (), (Batch(()),), ())


def report(step: int, rank: int) -> StepReport:
    return StepReport(step, rank, 7, (), (), (), 11, 13)


def ready(rank: int) -> Ready:
    return Ready(rank, 100 + rank, "model", 30, "digest", (("hidden", f"tcp:h:{rank}"),))


async def test_every_rank_gets_every_plan_and_every_report_comes(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        for first in range(0, 6, IN_FLIGHT_MAX):
            steps = range(first, first + IN_FLIGHT_MAX)
            for step in steps:
                leader.send_nowait(plan(step))
            for follower in followers:
                for step in steps:
                    assert await follower.plans.receive() == plan(step)
                    follower.report_nowait(report(step, follower.rank))
            found = [await leader.reports.receive() for _ in range(WORLD * IN_FLIGHT_MAX)]
            for rank in range(WORLD):
                assert [one for one in found if one.rank == rank] == [
                    report(step, rank) for step in steps
                ]


async def test_setups_go_down_in_parts_and_readiness_comes_up(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        leader.send_setup(Setup(b'{"tp": 2}'))
        for follower in followers:
            assert await follower.wait_setup() == Setup(b'{"tp": 2}')
            await follower.ready(ready(follower.rank))
        readies = await leader.wait_ready(LIMIT_S)
        assert readies == tuple(ready(rank) for rank in range(WORLD))
        setup = Setup(b"", min(one.pages for one in readies), (("hidden", 1, "tcp:h:1"),))
        leader.send_setup(setup)
        for follower in followers:
            assert await follower.wait_setup() == setup


async def test_who_is_not_ready_in_time_is_named(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        await followers[1].ready(ready(1))
        with pytest.raises(PlaneTimeout, match=r"ranks 0, 2 are not ready after 0\.05 s") as caught:
            await leader.wait_ready(0.05)
        assert caught.value.missing == (0, 2)


async def test_who_has_not_connected_is_named(autojump_clock: trio.testing.MockClock) -> None:
    with open_socket_folder() as folder:
        async with open_leader(Unix(f"{folder}/a.sock"), TERMS) as leader:
            with pytest.raises(PlaneTimeout, match="ranks 0, 1, 2 have not joined after 3 s"):
                await leader.wait_joined(3)


async def test_a_death_while_others_are_waited_for_is_told_at_once(opened: Open) -> None:
    async with opened() as (leader, followers), trio.open_nursery() as nursery:
        await leader.wait_joined(LIMIT_S)

        async def wait() -> None:
            with pytest.raises(RankDied, match="rank 2 died: it ran out of memory"):
                await leader.wait_ready(LIMIT_S)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        followers[2].leave("it ran out of memory")


async def test_states_are_told_in_the_middle_of_a_step(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        for follower in followers:
            follower.state = lambda rank=follower.rank: RankState(
                rank, 4, 5, 6, "computing", "x", 9
            )
        for _ in range(3):
            states = await leader.ask_states(LIMIT_S)
            assert states == tuple(
                RankState(rank, 4, 5, 6, "computing", "x", 9) for rank in range(WORLD)
            )


async def test_several_may_ask_at_once(opened: Open) -> None:
    async with opened() as (leader, _):
        await leader.wait_joined(LIMIT_S)

        async def ask() -> None:
            assert [state.rank for state in await leader.ask_states(LIMIT_S)] == [0, 1, 2]

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask)


async def test_the_dead_are_not_asked_and_the_others_answer(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        followers[1].leave("it was shot")
        with pytest.raises(RankDied):
            await leader.reports.receive()
        assert [state.rank for state in await leader.ask_states(LIMIT_S)] == [0, 2]


async def test_who_does_not_answer_is_left_out_and_found_by_the_watch(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async def stopped(hop: Hop) -> None:
        if hop.target == 1:
            await trio.sleep_forever()

    async with open_request_plane(WORLD, IN_FLIGHT_MAX, link=stopped) as (leader, _):
        for _ in range(3):  # questions do not pile up on the way
            assert [state.rank for state in await leader.ask_states(2)] == [0, 2]
        assert trio.current_time() < 10
        with pytest.raises(PlaneTimeout, match="rank 1 said nothing for 5 s") as caught:
            await leader.watch(5)
        assert caught.value.missing == (1,)


async def test_the_watch_goes_on_while_all_answer_and_ends_with_the_plane(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with (
        open_request_plane(WORLD, IN_FLIGHT_MAX) as (leader, _),
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(leader.watch, 5.0)
        await trio.sleep(100)
        leader.close()
    assert 100 <= trio.current_time() < 110


@pytest.mark.parametrize("error", [ValueError("too odd"), KeyError("x")])
async def test_what_a_rank_died_of_comes_out_of_reports_behind_its_reports(
    opened: Open, error: Exception
) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        leader.send_nowait(plan(0))
        await followers[1].plans.receive()
        followers[1].report_nowait(report(0, 1))
        followers[1].leave(last_words(error))
        assert await leader.reports.receive() == report(0, 1)
        for _ in range(2):
            with pytest.raises(RankDied) as caught:
                await leader.reports.receive()
            assert caught.value.rank == 1
            assert f"{type(error).__name__}: {error}" in str(caught.value)
        with pytest.raises(RankDied):
            leader.check()
        leader.send_nowait(plan(1))  # the others may get it, and nothing breaks


async def test_a_process_seen_dead_by_others_is_told_the_same_way(opened: Open) -> None:
    async with opened() as (leader, _):
        await leader.wait_joined(LIMIT_S)
        leader.rank_died(2, "exit code -9")
        with pytest.raises(RankDied, match="rank 2 died: exit code -9"):
            await leader.reports.receive()


async def test_when_the_leader_ends_the_plans_end_behind_the_last(opened: Open) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        leader.send_nowait(plan(0))
        leader.close()
        for follower in followers:
            assert [one async for one in follower.plans] == [plan(0)]
            assert await follower.wait_closed() == "the leader ended the plane"
            with pytest.raises(PeerError, match="the leader: it ended the plane"):
                await follower.wait_setup()


async def test_a_leader_that_dies_is_told_to_every_rank(opened: Open) -> None:
    found: list[FollowerEnd] = []
    with (
        pytest.raises(KeyError, match="mine")
        if opened is not over_tcp
        else pytest.RaisesGroup(KeyError)
    ):
        async with opened() as (leader, followers):
            await leader.wait_joined(LIMIT_S)
            found += followers
            raise KeyError("mine")
    for follower in found:
        with pytest.raises(PeerError, match="the leader: "):
            await follower.plans.receive()
        assert await follower.wait_closed() != "the leader ended the plane"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (report(0, 2), "it speaks as rank 2"),
        (report(5, 1), "it reported on step 5, which it was not sent"),
    ],
)
async def test_a_rank_that_breaks_the_protocol_is_dead_to_the_leader(
    opened: Open, wrong: StepReport, said: str
) -> None:
    async with opened() as (leader, followers):
        await leader.wait_joined(LIMIT_S)
        followers[1]._send(wrong)
        with pytest.raises(RankDied, match=f"rank 1 died: {said}"):
            await leader.reports.receive()


async def test_garbage_of_a_rank_and_of_a_leader_is_told_as_such() -> None:
    terms = Terms(1, 2, TERMS.secret)
    garbage = msgspec.msgpack.encode([0, "neither plan nor report"])
    async with open_leader(Tcp("127.0.0.1", 0), terms) as leader:
        identity = terms.identity("request", 0)
        connection = await connect(leader.address, identity, limit_s=LIMIT_S)
        await connection.frames.send(garbage)
        with pytest.raises(RankDied, match="rank 0 died: sent a malformed message"):
            await leader.reports.receive()
        await connection.frames.aclose()
    identity = terms.identity("request", -1)
    async with (
        open_listener(Tcp("127.0.0.1", 0), identity, (0,)) as listener,
        open_follower(listener.address, terms, 0, limit_s=LIMIT_S) as follower,
    ):
        connection = await listener.accept()
        async with connection.frames:
            await connection.frames.send(garbage)
            with pytest.raises(PeerError, match="the leader: sent a malformed message"):
                await follower.plans.receive()


async def test_a_rank_is_refused_by_a_leader_of_another_start() -> None:
    async with open_leader(Tcp("127.0.0.1", 0), msgspec.structs.replace(TERMS, run="2")) as leader:
        with pytest.raises(Refusal, match="its run is '1', ours is '2'"):
            async with open_follower(
                leader.address, msgspec.structs.replace(TERMS, run="1"), 0, limit_s=LIMIT_S
            ):
                pass


async def test_too_many_plans_are_our_bug_and_so_are_too_early_ones() -> None:
    async with open_request_plane(1, IN_FLIGHT_MAX) as (leader, (follower,)):
        for step in range(IN_FLIGHT_MAX):
            leader.send_nowait(plan(step))
        with pytest.raises(AssertionError, match="too many plans"):
            leader.send_nowait(plan(9))
        with pytest.raises(AssertionError):
            follower.report_nowait(report(0, 1))
    async with open_leader(Tcp("127.0.0.1", 0), TERMS) as leader:
        with pytest.raises(AssertionError, match="before all ranks are there"):
            leader.send_nowait(plan(0))


async def test_a_report_without_a_plan_is_our_bug() -> None:
    async with open_request_plane(1, IN_FLIGHT_MAX) as (_, (follower,)):
        with pytest.raises(AssertionError, match="a report without a plan"):
            follower.report_nowait(report(0, 0))


async def test_a_leader_that_sends_too_much_is_told_by_the_follower() -> None:
    async with open_request_plane(1, IN_FLIGHT_MAX) as (_, (follower,)):
        for number in range(SETUPS_MAX):
            follower.take(Setup(b"", number))
        with pytest.raises(PeerError, match="the leader: it sends more than this rank can hold"):
            follower.take(Setup(b"", 99))
        for step in range(IN_FLIGHT_MAX):
            follower.take(plan(step))
        with pytest.raises(PeerError, match="more than this rank can hold"):
            follower.take(plan(9))


async def test_a_cut_link_is_told_to_both_ends(autojump_clock: trio.testing.MockClock) -> None:
    async def cut(hop: Hop) -> None:
        if hop == Hop("request", 1, -1):
            raise PeerError(str(hop), "was cut")

    async with open_request_plane(2, IN_FLIGHT_MAX, link=cut) as (leader, followers):
        leader.send_nowait(plan(0))
        for follower in followers:
            await follower.plans.receive()
            follower.report_nowait(report(0, follower.rank))
        assert (await leader.reports.receive()).rank == 0
        with pytest.raises(RankDied, match="rank 1 died: request from rank 1 to the leader: was"):
            await leader.reports.receive()
        with pytest.raises(PeerError, match="was cut"):
            await followers[1].plans.receive()
        assert [state.rank for state in await leader.ask_states(1)] == [0]


async def test_a_cancelled_rank_still_says_goodbye() -> None:
    terms, scope = Terms(1, 2, TERMS.secret), trio.CancelScope()
    async with (
        open_leader(Tcp("127.0.0.1", 0), terms) as leader,
        trio.open_nursery() as nursery,
    ):

        async def follow() -> None:
            with scope:
                async with open_follower(leader.address, terms, 0, limit_s=LIMIT_S):
                    await trio.sleep_forever()

        nursery.start_soon(follow)
        await leader.wait_joined(LIMIT_S)
        scope.cancel()
        with pytest.raises(RankDied, match="rank 0 died: it was cancelled"):
            await leader.reports.receive()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, ""),
        (ValueError("x"), "ValueError: x"),
        (ExceptionGroup("many", [ExceptionGroup("one", [RankDied(1, "y")])]), "RankDied: rank 1"),
        (ExceptionGroup("many", [ValueError("x"), KeyError("y")]), "ExceptionGroup: many"),
    ],
)
def test_last_words_name_the_error(error: BaseException | None, said: str) -> None:
    assert last_words(error).startswith(said)
