"""The board and signatures as data, and the greenlets that forwards run in."""

import threading

import pytest
import torch
import trio
import trio.testing

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout
from aserve.planes import signature
from aserve.planes.board import Board, Call, combined, share
from aserve.planes.inline import compute_inline, open_inline_planes
from aserve.planes.layer import LayerEnd, open_thread_planes
from aserve.planes.signature import Signature
from tests.planes.ranks import closing, wait_until_waiting

EXCHANGE = Signature(1, 7, 2, "all_to_all", "ep", "bfloat16", (5, 8), (2, 3, 0, 3))
SIGNATURES = [
    Signature(0, 0, 0, "all_reduce", "tp", "float32", (2, 3)),
    Signature(3, 9, 12, "all_gather", "rows", "int64", (4,), (4, 0)),
    Signature(2, 1, 1, "reduce_scatter", "tp", "float64", (1, 4, 8), (1, 3)),
    EXCHANGE,
]


@pytest.mark.parametrize("call", SIGNATURES, ids=str)
def test_a_signature_survives_its_words(call: Signature) -> None:
    assert signature.from_words(call.agreed(), call.own()) == call


def test_who_is_late_since_it_waits_for_another_is_not_the_one_that_is_missing() -> None:
    """Of attn_tp 01 23, rows 02 13: rank 0 waits for 1, which waits for 3."""
    waits = [(Signature(0, 0, 0, "all_reduce", "attn_tp", "float32", (1,)), (0, 1))]
    waits += [(Signature(1, 0, 0, "all_reduce", "rows", "float32", (1,)), (1, 3))]
    pure = Board()
    meetings = [pure.post(Call(called, members, torch.ones(1))) for called, members in waits]
    pure.time_out(meetings[0], waits[0][0], 1.0)
    with pytest.raises(PlaneTimeout) as caught:
        pure.check()
    assert caught.value.missing == (3,)
    assert f"{waits[1][0]} (waiting); rank 3 has made no call" in str(caught.value)


def test_a_signature_reads_as_a_call() -> None:
    call = Signature(1, 7, 12, "all_gather", "rows", "float32", (4, 64), (4, 2))
    text = "rank 1 all_gather#12 of step 7 over rows float32 [4, 64] counts [4, 2]"
    assert str(call) == text
    assert str(EXCHANGE).endswith("bfloat16 [5, 8] sends [2, 3] receives [0, 3]")


def test_rows_differ_by_rank_only_where_counts_say_so() -> None:
    mine = Signature(0, 0, 0, "all_gather", "tp", "float32", (4, 8), (4, 1))
    peer = Signature(1, 0, 0, "all_gather", "tp", "float32", (1, 8), (4, 1))
    assert not signature.differ(mine, peer, (0, 1))
    sent = Signature(0, 0, 0, "all_to_all", "ep", "float32", (3, 8), (1, 2, 1, 0))
    got = Signature(1, 0, 0, "all_to_all", "ep", "float32", (5, 8), (0, 5, 2, 5))
    assert not signature.differ(sent, got, (0, 1))
    wrong = Signature(1, 0, 0, "all_to_all", "ep", "float32", (5, 8), (0, 5, 1, 5))
    assert signature.differ(sent, wrong, (0, 1))


@pytest.mark.parametrize(
    "failure",
    [
        signature.mismatch("a", "b"),
        signature.timeout("rank 0 waited", 2.0, (1, 2), ("x", "y")),
        signature.broken("why"),
        signature.Failure("died", "killed", ranks=(3,)),
    ],
)
def test_a_failure_survives_its_bytes_and_raises_the_same(failure: signature.Failure) -> None:
    again = signature.decode_failure(signature.encode_failure(failure))
    assert type(again.error()) is type(failure.error())
    assert str(again.error()) == str(failure.error())
    assert vars(again.error()) == vars(failure.error())


def posted(board: Board, rank: int, members: tuple[int, ...] = (0, 1), number: int = 0) -> Call:
    called = Signature(rank, 0, number, "all_reduce", "tp", "float32", (1, 2))
    call = Call(called, members, torch.full((1, 2), float(rank)))
    board.post(call)
    return call


def test_a_meeting_is_complete_when_all_members_have_come() -> None:
    board = Board()
    first = posted(board, 0)
    (meeting,) = board.open.values()
    assert meeting.missing == (1,)
    assert "(waiting)" in board.last_call(0)
    posted(board, 1)
    assert (board.open, meeting.missing) == ({}, ())
    assert "(returned)" in board.last_call(0)
    results = combined(meeting)
    assert share(results, first).tolist() == [1.0, 1.0]


def test_a_rank_that_waits_for_one_that_waits_for_it_elsewhere_is_found_at_once() -> None:
    board = Board()
    posted(board, 1, (1, 2))
    with pytest.raises(PlaneMismatch, match=r"rank 1 .* rank 2 "):
        posted(board, 2, (0, 1, 2))
    with pytest.raises(PlaneMismatch, match=r"rank 1 .* rank 2 "):
        posted(board, 0, (0, 1, 2))


def test_who_waits_elsewhere_for_others_may_still_come() -> None:
    board = Board()
    posted(board, 1, (1, 2))
    posted(board, 0, (0, 1))
    posted(board, 2, (1, 2))
    posted(board, 1, (0, 1))
    assert board.open == {}


def test_the_first_failure_stays() -> None:
    board = Board()
    board.fail(signature.broken("first"))
    board.fail(signature.broken("second"))
    with pytest.raises(PlaneError, match="first"):
        posted(board, 0)


# What only planes of one process can be made to do.

PAIR = Grid(Layout(tp=2))
X = torch.ones(1, 4)


def test_abort_wakes_a_thread_that_waits() -> None:
    planes = open_thread_planes(PAIR, limit_s=60)
    heard: list[str] = []

    def wait() -> None:
        planes[0].start(0)
        with pytest.raises(PlaneError) as caught:
            planes[0].group("tp").all_reduce(X)
        heard.append(str(caught.value))

    with closing(planes):
        thread = threading.Thread(target=wait)
        thread.start()
        wait_until_waiting(planes[0])
        planes[1].abort("its process died")
        thread.join(10)
    assert heard == ["its process died"]


def test_closing_one_end_tells_those_who_wait_for_it() -> None:
    planes = open_thread_planes(PAIR, limit_s=60)
    planes[1].close()
    with pytest.raises(PlaneError, match="rank 1 closed its layer plane"):
        planes[0].start(0)


def forward(plane: LayerEnd, unwound: list[int]) -> float:
    try:
        return float(plane.group("tp").all_reduce(X).sum())
    finally:
        unwound.append(plane.rank)


async def test_a_cancelled_forward_is_unwound_and_its_peers_hear_of_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    planes = open_inline_planes(PAIR, limit_s=10)
    unwound: list[int] = []
    for plane in planes.values():
        plane.start(0)
    with trio.move_on_after(3) as scope:
        await compute_inline(forward, planes[0], unwound)
    assert scope.cancelled_caught
    assert unwound == [0]
    with pytest.raises(PlaneError, match=r"rank 0 all_reduce#0 .* was given up: Cancelled"):
        await compute_inline(forward, planes[1], unwound)
    assert trio.current_time() == 3


async def test_a_missing_rank_is_told_in_virtual_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    planes = open_inline_planes(PAIR, limit_s=10)
    planes[0].start(4)
    with pytest.raises(PlaneTimeout, match=r"rank 1 is missing.*rank 1 has made no call"):
        await compute_inline(forward, planes[0], [])
    assert trio.current_time() == 10


async def test_abort_wakes_a_parked_forward(autojump_clock: trio.testing.MockClock) -> None:
    planes = open_inline_planes(PAIR, limit_s=10)
    planes[0].start(0)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def wait() -> None:
            with pytest.raises(PlaneError, match="enough"):
                await compute_inline(forward, planes[0], [])

        await trio.sleep(1)
        planes[1].abort("enough")
    assert trio.current_time() == 1


async def test_a_parked_forward_keeps_its_torch_modes_to_itself() -> None:
    planes = open_inline_planes(PAIR, limit_s=10)
    seen: list[tuple[int, bool, bool]] = []

    def modes(plane: LayerEnd) -> None:
        plane.start(0)
        with torch.inference_mode() if plane.rank == 0 else torch.no_grad():
            for _ in range(3):
                plane.group("tp").all_reduce(X)
                inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
                seen.append((plane.rank, inference, grad))

    async with trio.open_nursery() as nursery:
        for plane in planes.values():
            nursery.start_soon(compute_inline, modes, plane)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
    assert sorted(set(seen)) == [(0, True, False), (1, False, False)]


async def test_a_forward_without_collectives_needs_no_plane() -> None:
    assert await compute_inline(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await compute_inline(divmod, 1, 0)


async def test_a_collective_outside_compute_inline_is_told_so() -> None:
    planes = open_inline_planes(PAIR, limit_s=10)
    planes[0].start(0)
    with pytest.raises(RuntimeError, match="compute_inline"):
        planes[0].group("tp").all_reduce(X)
