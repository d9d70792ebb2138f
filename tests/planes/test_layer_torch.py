"""What only the torch.distributed plane can get wrong: who is missing, and planes without tags."""

import threading

import pytest
import torch
import torch.distributed as dist

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import ConfigError, PlaneError, PlaneMismatch, PlaneTimeout
from aserve.planes.layer import LayerEnd
from aserve.planes.torch_exchange import AllToAllExchange, Network
from aserve.planes.torch_plane import SHARED_SUM_BYTES, TorchTransport, open_torch_plane
from aserve.planes.torch_watch import Watch
from aserve.testing.collectives import Case, Group, check_collective
from tests.planes import ranks

PAIR = Grid(Layout(tp=2))
X = torch.ones(1, 4)


def opened(grid: Grid, limit_s: float) -> dict[int, LayerEnd]:
    network = Network(dist.HashStore(), "127.0.0.1")
    planes: dict[int, LayerEnd] = {}

    def open_one(rank: int) -> None:
        planes[rank] = open_torch_plane(grid, rank, network, limit_s=limit_s)

    assert not any(ranks.on_threads(grid, open_one).values())
    return planes


def run_untagged(case: Case) -> dict[int, BaseException | None]:
    """As over NCCL: nothing but all-to-all, and digests compared as a step starts."""
    grid, store = Grid(case.layout), dist.HashStore()
    planes: dict[int, LayerEnd] = {}
    for rank in range(grid.world):
        stage = range(rank // grid.tp * grid.tp, (rank // grid.tp + 1) * grid.tp)
        own = dist.PrefixStore(str(stage[0]), store)
        exchange = AllToAllExchange(Network(own, "127.0.0.1"), stage, rank, case.limit_s)
        watch = Watch(grid, rank, own, exchange, case.limit_s)
        planes[rank] = LayerEnd(grid, rank, TorchTransport(grid, rank, exchange, watch, "step"))
    with ranks.closing(planes):
        return ranks.on_threads(grid, lambda rank: case.body(planes[rank], grid))


@pytest.mark.slow
def test_a_backend_without_tags_passes_what_needs_none() -> None:
    names = ["every op over 2 ranks", "every op over 3 ranks", "two stages", "no rows", "blocks"]
    check_collective(run_untagged, names)


@pytest.mark.slow
def test_without_tags_different_calls_are_told_as_the_next_step_starts() -> None:
    def body(plane: LayerEnd, grid: Grid) -> None:
        plane.start(0)
        x = torch.ones(2, 4, dtype=torch.int32 if plane.rank == 1 else torch.float32)
        plane.group("tp").all_gather(x, [2, 2])
        with pytest.raises(PlaneMismatch) as caught:
            plane.start(1)
        assert [text[:16] for text in caught.value.calls] == [
            "rank 0 at step 1",
            "rank 1 at step 1",
        ]
        assert "all_gather#0 of step 0 over tp int32" in caught.value.calls[1]

    assert run_untagged(Case("", Layout(tp=2), body)) == {0: None, 1: None}


@pytest.mark.slow
def test_without_tags_ranks_at_different_steps_are_told() -> None:
    def body(plane: LayerEnd, grid: Grid) -> None:
        with pytest.raises(PlaneMismatch, match=r"rank 0 at step 0 .* but rank 1 at step 1 "):
            plane.start(plane.rank)

    assert run_untagged(Case("", Layout(tp=2), body)) == {0: None, 1: None}


@pytest.mark.slow
def test_large_sums_taken_in_shares_have_the_bits_of_small_ones() -> None:
    grid = Grid(Layout(tp=3))
    planes = opened(grid, 20)
    n = SHARED_SUM_BYTES // 8

    def run(rank: int) -> None:
        planes[rank].start(0)
        tp = Group(planes[rank], grid, "tp")
        for width in (n - 1, n + 1, n + 2, n + 3):
            tp.all_reduce((2, width), torch.float32, width)

    with ranks.closing(planes):
        raised = ranks.on_threads(grid, run)
    assert set(raised.values()) == {None}, raised


@pytest.mark.slow
def test_abort_wakes_ranks_that_wait_here_and_elsewhere() -> None:
    grid = Grid(Layout(tp=3))
    planes = opened(grid, 60)
    heard: list[int] = []

    def wait(rank: int) -> None:
        planes[rank].start(0)
        with pytest.raises(PlaneError, match="rank 1 is gone"):
            planes[rank].group("tp").all_reduce(X)
        heard.append(rank)

    with ranks.closing(planes):
        threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
        for thread, rank in zip(threads, (0, 2), strict=True):
            thread.start()
            ranks.wait_until_waiting(planes[rank])
        planes[0].abort("rank 1 is gone")
        for thread in threads:
            thread.join(10)
    assert sorted(heard) == [0, 2]


@pytest.mark.slow
def test_ranks_that_do_not_come_to_the_opening_are_named() -> None:
    with pytest.raises(PlaneTimeout, match=r"rank 0 .* ranks \[1, 2\] did not come") as caught:
        open_torch_plane(Grid(Layout(tp=3)), 0, Network(dist.HashStore(), "127.0.0.1"), limit_s=0.2)
    assert caught.value.missing == (1, 2)


def test_a_backend_that_torch_lacks_is_a_config_error() -> None:
    network = Network(dist.HashStore(), backend="smoke-signals")
    with pytest.raises(ConfigError, match="smoke-signals"):
        open_torch_plane(PAIR, 0, network, limit_s=1)


def test_one_rank_needs_no_network() -> None:
    network = Network(dist.HashStore(), "127.0.0.1")
    plane = open_torch_plane(Grid(Layout(pp=2)), 1, network, limit_s=1)
    plane.start(0)
    assert plane.group("tp").all_reduce(X).tolist() == [1.0] * 4


def test_a_watch_ends_with_its_plane() -> None:
    before = threading.active_count()
    for plane in opened(PAIR, 5).values():
        plane.close()
    assert threading.active_count() == before
