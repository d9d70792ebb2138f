"""Who is beside whom in the hidden plane, what a header says, and planes that do not come about."""

from contextlib import AsyncExitStack

import msgspec
import pytest
import torch
import torch.distributed as dist
import trio
import trio.testing

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import PeerError, PlaneTimeout, RankDied
from aserve.planes.hidden import HiddenEnd, OnlyStage, open_hidden_plane
from aserve.planes.hidden_bundle import HEADER, Header, Neighbours, described, n_bytes, shapes_of
from aserve.planes.hidden_stream import open_hidden_listener, open_stream_hidden
from aserve.planes.hidden_torch import open_torch_hidden
from aserve.planes.terms import Terms
from aserve.wire.address import Tcp, Unix
from aserve.wire.connection import connect
from aserve.wire.hello import Refusal
from aserve.wire.link import Hop

GRID = Grid(Layout(pp=3, tp=2))
TERMS = Terms(GRID.world, 2, b"known to all of us")
X = {"hidden": torch.ones(3, 4)}
SHAPES = shapes_of(X)
LIMIT_S = 10.0


def test_a_rank_sits_between_its_likes() -> None:
    assert [Neighbours.of(GRID, rank) for rank in range(6)] == [
        Neighbours(0, None, 2),
        Neighbours(1, None, 3),
        Neighbours(2, 0, 4),
        Neighbours(3, 1, 5),
        Neighbours(4, 2, None),
        Neighbours(5, 3, None),
    ]


def test_a_description_does_not_depend_on_the_order_of_names() -> None:
    first = {"a": ((2, 3), torch.bfloat16), "b": ((), torch.int64)}
    second = dict(reversed(first.items()))
    assert described(first) == described(second) == "a bfloat16[2, 3], b int64[]"
    assert n_bytes(first) == 20
    assert Header.of(5, first) == Header.of(5, second)


def test_a_header_comes_back_and_no_other_bytes_pass_for_one() -> None:
    header = Header.of(2**40, SHAPES)
    assert Header.unpack(header.pack()) == header
    assert len(header.pack()) == HEADER.size == 32
    assert Header.unpack(bytes(HEADER.size)) is None


async def test_a_stage_that_is_alone_talks_to_nobody() -> None:
    end: HiddenEnd = OnlyStage()
    assert not end.has_previous
    assert not end.has_next
    end.abort("nothing")
    with pytest.raises(AssertionError):
        await end.receive(0, SHAPES)
    with pytest.raises(AssertionError):
        await end.send(0, X)


async def pass_through(ends: list[HiddenEnd]) -> None:
    """Every rank of the first stage sends its own; the last stage has it unchanged."""
    assert [end.has_previous for end in ends] == [False] * 2 + [True] * 4
    assert [end.has_next for end in ends] == [True] * 4 + [False] * 2

    async def obey(rank: int) -> None:
        for step in range(5):
            bundle = {"hidden": torch.full((3, 4), 10.0 * step + rank % 2)}
            if ends[rank].has_previous:
                found = await ends[rank].receive(step, SHAPES)
                assert torch.equal(found["hidden"], bundle["hidden"]), (rank, step)
                bundle = found
            if ends[rank].has_next:
                await ends[rank].send(step, bundle)

    async with trio.open_nursery() as nursery:
        for rank in range(GRID.world):
            nursery.start_soon(obey, rank)


async def test_three_stages_in_one_process(autojump_clock: trio.testing.MockClock) -> None:
    async with open_hidden_plane(GRID, 2, limit_s=LIMIT_S) as ends:
        await pass_through(list(ends))


async def test_three_stages_over_unix_sockets(folder: str) -> None:
    seats = [Neighbours.of(GRID, rank) for rank in range(GRID.world)]
    async with AsyncExitStack() as stack:
        listeners = {
            beside.rank: await stack.enter_async_context(
                open_hidden_listener(Unix(f"{folder}/{beside.rank}"), TERMS, beside)
            )
            for beside in seats
            if beside.previous is not None
        }
        nursery = await stack.enter_async_context(trio.open_nursery())
        ends: dict[int, HiddenEnd] = {}
        all_here, done = trio.Event(), trio.Event()

        async def hold(beside: Neighbours) -> None:
            async with open_stream_hidden(
                beside,
                TERMS,
                listener=listeners.get(beside.rank),
                following=None if beside.next is None else listeners[beside.next].address,
                limit_s=LIMIT_S,
            ) as ends[beside.rank]:
                if len(ends) == GRID.world:
                    all_here.set()
                await done.wait()

        for beside in seats:
            nursery.start_soon(hold, beside)
        await all_here.wait()
        await pass_through([ends[rank] for rank in range(GRID.world)])
        done.set()


async def test_what_a_rank_of_this_process_died_of_is_told_to_both_sides(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with open_hidden_plane(GRID, 2, limit_s=LIMIT_S) as ends:
        await ends[0].send(0, X)
        await ends[2].send(0, X)
        with pytest.raises(KeyError):
            async with ends[2]:
                raise KeyError("mine")
        assert torch.equal((await ends[4].receive(0, SHAPES))["hidden"], X["hidden"])
        with pytest.raises(RankDied, match="rank 2 died: KeyError: 'mine'"):
            await ends[4].receive(1, SHAPES)
        with pytest.raises(RankDied, match="rank 2 died: KeyError: 'mine'"):
            await ends[0].send(1, X)
        await ends[3].send(0, X)  # the other column knows nothing of it
        await ends[5].receive(0, SHAPES)


async def test_a_cut_link_is_told_to_both_sides(autojump_clock: trio.testing.MockClock) -> None:
    async def cut(hop: Hop) -> None:
        if hop == Hop("hidden", 2, 4):
            raise PeerError(str(hop), "was cut")

    async with open_hidden_plane(GRID, 2, limit_s=LIMIT_S, link=cut) as ends:
        await ends[2].send(0, X)
        with pytest.raises(RankDied, match="rank 2 died: hidden from rank 2 to rank 4: was cut"):
            await ends[4].receive(0, SHAPES)
        with pytest.raises(RankDied, match="rank 4 died: hidden from rank 2 to rank 4: was cut"):
            await ends[2].send(1, X)
    assert trio.current_time() < LIMIT_S


async def test_a_paused_link_is_a_timeout(autojump_clock: trio.testing.MockClock) -> None:
    async def paused(hop: Hop) -> None:
        await trio.sleep_forever()

    async with open_hidden_plane(GRID, 2, limit_s=LIMIT_S, link=paused) as ends:
        await ends[0].send(0, X)
        with pytest.raises(PlaneTimeout, match="rank 0 sent nothing of step 0 to rank 2"):
            await ends[2].receive(0, SHAPES)


async def test_a_stage_before_that_never_connects_is_named() -> None:
    beside = Neighbours.of(GRID, 4)
    async with open_hidden_listener(Tcp("127.0.0.1", 0), TERMS, beside) as listener:
        with pytest.raises(PlaneTimeout, match="rank 2 did not connect to rank 4") as caught:
            async with open_stream_hidden(
                beside, TERMS, listener=listener, following=None, limit_s=0.05
            ):
                pass
    assert caught.value.missing == (2,)


async def test_a_stage_after_that_is_not_there_is_named(folder: str) -> None:
    following = Unix(f"{folder}/nobody")
    with pytest.raises(PlaneTimeout, match=r"rank 2 at unix:.*not reached") as caught:
        async with open_stream_hidden(
            Neighbours.of(GRID, 0), TERMS, listener=None, following=following, limit_s=0.05
        ):
            pass
    assert caught.value.missing == (2,)


async def test_only_the_rank_before_is_let_in() -> None:
    async with open_hidden_listener(Tcp("127.0.0.1", 0), TERMS, Neighbours.of(GRID, 4)) as listener:
        with pytest.raises(Refusal, match="rank 3 is not expected here, but 2"):
            await connect(listener.address, TERMS.identity("hidden", 3), limit_s=LIMIT_S)
        stranger = msgspec.structs.replace(TERMS, secret=b"not known to all of us")
        with pytest.raises(Refusal, match="its secret is not ours"):
            await connect(listener.address, stranger.identity("hidden", 2), limit_s=LIMIT_S)


async def test_a_rank_that_never_comes_to_torch_distributed_is_named() -> None:
    opening = open_torch_hidden(
        Neighbours.of(GRID, 0), dist.HashStore(), in_flight_max=2, limit_s=0.05, host="127.0.0.1"
    )
    with pytest.raises(PlaneTimeout, match="rank 2: ") as caught:
        await opening.__aenter__()
    assert caught.value.missing == (2,)
