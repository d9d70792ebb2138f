"""Ranks in this process: a thread each, or all in the thread that asks.

They share what is read only (the tokenizer) and meet through memory. Weights stay when ranks are
started anew; runners and their KV do not.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import trio

from aserve.actors.compute import ComputeThread, open_compute_thread
from aserve.actors.launch import most_telling, run_as_rank
from aserve.actors.loading import (
    Progress,
    RankModel,
    load,
    load_known,
    load_rank,
    one_at_a_time,
    shares,
)
from aserve.actors.placement import Known, Placement, Ranks, in_flight_max
from aserve.actors.rank import RankRunner, Watch, run_rank, state_of
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.planes.hidden import HiddenEnd, open_hidden_plane
from aserve.planes.inline import compute_inline, open_inline_planes
from aserve.planes.layer import LayerEnd, open_thread_planes
from aserve.planes.request import FollowerEnd
from aserve.planes.request_memory import open_request_plane
from aserve.tensor.collective import LayerPlane

Compute = Callable[..., Awaitable[Any]]
MakeRunner = Callable[[int, LayerPlane, int], RankRunner[Any, Any]]  # of rank, plane, pages_total


class RanksHere:
    """A placement. `make_runner` is called where the rank computes, at every start."""

    def __init__(
        self,
        config: Config,
        known: Known,
        make_runner: MakeRunner,
        computes: Sequence[Compute],
        pages_total: int,
    ) -> None:
        self.known = known
        self._config = config
        self._grid = Grid(config.layout)
        self._make_runner = make_runner
        self._computes = computes
        self._pages_total = pages_total
        assert len(computes) == self._grid.world, len(computes)

    @asynccontextmanager
    async def open_ranks(self, pages_total: int | None) -> AsyncIterator[Ranks]:
        """See `Placement`."""
        pages_total = pages_total or self._pages_total
        grid, limit_s, bound = self._grid, self._config.ranks.plane_s, in_flight_max(self._config)
        inline = self._computes[0] is compute_inline
        layers = (open_inline_planes if inline else open_thread_planes)(grid, limit_s=limit_s)
        async with (
            open_request_plane(grid.world, bound) as (leader_end, followers),
            open_hidden_plane(grid, bound, limit_s=limit_s) as hiddens,
            trio.open_nursery() as nursery,
        ):
            try:
                for rank, compute in enumerate(self._computes):
                    layer = layers[rank]
                    runner = await compute(self._make_runner, rank, layer, pages_total)
                    ends = (followers[rank], hiddens[rank], layer)
                    run = partial(_obey, runner, ends, compute)
                    nursery.start_soon(_guarded, rank, run, layers)
                    del runner, run
                yield Ranks(leader_end, pages_total)
            finally:
                # A thread that waits for a peer cannot be cancelled, but it can be told.
                for layer in layers.values():
                    layer.abort("the ranks are being ended")
                nursery.cancel_scope.cancel()


async def _guarded(
    rank: int, run: Callable[[], Awaitable[None]], layers: Mapping[int, LayerEnd]
) -> None:
    try:
        await run_as_rank(rank, run)
    finally:
        for layer in layers.values():
            layer.abort(f"rank {rank} is gone")


async def _obey(
    runner: RankRunner[Any, Any],
    ends: tuple[FollowerEnd, HiddenEnd, LayerEnd],
    compute: Compute,
) -> None:
    plane, hidden, layer = ends
    watch = Watch()
    plane.state = partial(state_of, plane.rank, watch, runner, layer)
    async with plane:
        await run_rank(runner, plane, hidden, compute, watch)


@asynccontextmanager
async def open_here(
    config: Config, progress: Progress | None, *, inline: bool
) -> AsyncIterator[Placement]:
    """Load every rank's share of the model, each on its own thread, all at once.

    `inline`: loaded on threads that end then, computed in the caller's.
    """
    world = Grid(config.layout).world
    progress = one_at_a_time(progress)
    async with AsyncExitStack() as stack:
        loading = await stack.enter_async_context(AsyncExitStack())
        threads = [
            await loading.enter_async_context(open_compute_thread(f"aserve-rank-{rank}"))
            for rank in range(world)
        ]
        known, path = await load(threads[0], partial(load_known, config), progress)
        models: list[RankModel] = []
        stack.callback(models.clear)  # whoever holds the engine need not hold the weights
        works = [
            partial(load_rank, config, path, known.context_len, share)
            for share in shares(config, range(world))
        ]
        models += await _load_all(threads, works, progress)
        computes: list[Compute] = list(threads)
        if inline:
            await loading.aclose()
            computes = [compute_inline] * world

        def make(rank: int, plane: LayerPlane, pages_total: int) -> RankRunner[Any, Any]:
            return models[rank].runner(known.tokenizer, plane, pages_total)

        pages_total = min(model.pages for model in models)
        yield RanksHere(config, known, make, computes, pages_total)


async def _load_all(
    threads: Sequence[ComputeThread],
    works: Sequence[Callable[[Progress], RankModel]],
    progress: Progress | None,
) -> list[RankModel]:
    """Raises one error, that of the rank which failed first."""
    found: dict[int, RankModel] = {}

    async def load_one(rank: int) -> None:
        found[rank] = await load(threads[rank], works[rank], progress)

    try:
        async with trio.open_nursery() as nursery:
            for rank in range(len(threads)):
                nursery.start_soon(load_one, rank)
    except ExceptionGroup as group:
        raise most_telling(group) from None
    return [found[rank] for rank in range(len(threads))]
