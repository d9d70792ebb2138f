"""Runs cases of the layer planes' suite on ranks that are threads, or greenlets of one thread."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch.distributed as dist
import trio
import trio.testing

from aserve.core.layout import Grid
from aserve.planes.inline import compute_inline, open_inline_planes
from aserve.planes.layer import LayerEnd, open_thread_planes
from aserve.planes.shared_memory import open_shared_memory_plane
from aserve.planes.torch_exchange import Network
from aserve.planes.torch_plane import open_torch_plane
from aserve.testing.collectives import Case

NUMBERS = itertools.count()


def on_threads(grid: Grid, body: Callable[[int], None]) -> dict[int, BaseException | None]:
    """`body(rank)` on a thread for each rank; what each raised."""
    raised: dict[int, BaseException | None] = {}

    def run(rank: int) -> None:
        try:
            body(rank)
            raised[rank] = None
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(grid.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(sorted(raised.items()))


def wait_until_waiting(plane: LayerEnd) -> None:
    until_s = time.monotonic() + 10
    while "(waiting)" not in plane.last_call:
        assert time.monotonic() < until_s
        time.sleep(0.0005)


@contextmanager
def closing(planes: Mapping[int, LayerEnd]) -> Iterator[None]:
    try:
        yield
    finally:
        for plane in planes.values():
            plane.close()


def run_threads(case: Case) -> dict[int, BaseException | None]:
    grid = Grid(case.layout)
    planes = open_thread_planes(grid, limit_s=case.limit_s)
    with closing(planes):
        return on_threads(grid, lambda rank: case.body(planes[rank], grid))


def run_inline(case: Case) -> dict[int, BaseException | None]:
    """In virtual time: limits cost nothing."""
    grid = Grid(case.layout)
    planes = open_inline_planes(grid, limit_s=case.limit_s)
    raised: dict[int, BaseException | None] = {}

    async def run(rank: int) -> None:
        try:
            await compute_inline(case.body, planes[rank], grid)
            raised[rank] = None
        except BaseException as error:
            raised[rank] = error

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for rank in range(grid.world):
                nursery.start_soon(run, rank)

    with closing(planes):
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return dict(sorted(raised.items()))


def run_shared_memory(case: Case) -> dict[int, BaseException | None]:
    """On threads, each with a map of its own, and halves so small that little needs rounds."""
    grid = Grid(case.layout)
    name = f"aserve-test-{os.getpid()}-{next(NUMBERS)}"

    def opened(rank: int) -> LayerEnd:
        return open_shared_memory_plane(name, grid, rank, limit_s=case.limit_s, half_bytes=64 << 10)

    planes = {rank: opened(rank) for rank in range(grid.world)}
    with closing(planes):
        return on_threads(grid, lambda rank: case.body(planes[rank], grid))


def run_torch(check: Literal["step", "call"], case: Case) -> dict[int, BaseException | None]:
    """On threads, each with sockets of its own."""
    grid = Grid(case.layout)
    network = Network(dist.HashStore(), "127.0.0.1")
    planes: dict[int, LayerEnd] = {}

    def opened(rank: int) -> None:
        planes[rank] = open_torch_plane(grid, rank, network, limit_s=case.limit_s, check=check)

    assert not any(on_threads(grid, opened).values())
    with closing(planes):
        return on_threads(grid, lambda rank: case.body(planes[rank], grid))
