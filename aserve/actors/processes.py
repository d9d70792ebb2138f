"""Ranks in processes of this host, one each, which this process starts, watches and ends."""

import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import trio

from aserve.actors.child import Child, Summons, open_children
from aserve.actors.compute import open_compute_thread
from aserve.actors.loading import Progress, load, load_known
from aserve.actors.muster import muster
from aserve.actors.placement import Known, Placement, Ranks, in_flight_max
from aserve.actors.wiring import segment_name
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.planes.request import LeaderEnd
from aserve.planes.request_stream import open_leader
from aserve.planes.shared_memory import remove_shared_memory
from aserve.planes.terms import Terms
from aserve.wire.address import Unix
from aserve.wire.hello import new_secret
from aserve.wire.listener import open_socket_folder

SILENT_SHARE = 0.5  # of ranks.plane_s: who is stopped is named before its peers give up on it


def silent_s(config: Config) -> float:
    return config.ranks.plane_s * SILENT_SHARE


class RankProcesses:
    """A placement. Every start has new processes, a new secret and a new folder."""

    def __init__(self, config: Config, known: Known, progress: Progress | None) -> None:
        self.known = known
        self.children: list[Child] = []  # of the present start, by rank
        self._config = config
        self._grid = Grid(config.layout)
        self._progress = progress

    @asynccontextmanager
    async def open_ranks(self, pages_total: int | None) -> AsyncIterator[Ranks]:
        """See `Placement`."""
        config, run = self._config, secrets.token_hex(6)
        terms = Terms(self._grid.world, in_flight_max(config), new_secret(), run)
        try:
            with open_socket_folder() as folder:
                if self._progress is not None:  # each brings torch before it has a word to say
                    self._progress(0, 0, f"starting {terms.world} processes")
                address = Unix(os.path.join(folder, "request"))
                summonses = [self._summons(rank, address, terms) for rank in self._ranks]
                async with (
                    open_leader(address, terms) as end,
                    open_children(summonses) as self.children,
                    trio.open_nursery() as nursery,
                ):
                    for child in self.children:
                        nursery.start_soon(_watch, child, end)
                        nursery.start_soon(child.listen, self._progress)
                    pages = await muster(end, config, pages_total, run)
                    self._progress = None  # later starts are nobody's wait at a terminal
                    yield Ranks(end, pages, partial(end.watch, silent_s(config)))
                    nursery.cancel_scope.cancel()
        finally:
            self.children = []
            remove_shared_memory(segment_name(run), self._grid)

    @property
    def _ranks(self) -> range:
        return range(self._grid.world)

    def _summons(self, rank: int, address: Unix, terms: Terms) -> Summons:
        return Summons(
            rank=rank,
            world=terms.world,
            in_flight_max=terms.in_flight_max,
            address=str(address),
            secret=terms.secret,
            run=terms.run,
            start_s=self._config.ranks.start_s,
            leader_pid=os.getpid(),
        )


async def _watch(child: Child, end: LeaderEnd) -> None:
    """The kernel knows first."""
    end.rank_died(child.rank, await child.wait())


@asynccontextmanager
async def open_processes(config: Config, progress: Progress | None) -> AsyncIterator[Placement]:
    """All that the leader itself needs is the tokenizer."""
    async with open_compute_thread("aserve-loading") as compute:
        known, path = await load(compute, partial(load_known, config), progress)
    model = msgspec.structs.replace(config.model, path=path)
    yield RankProcesses(msgspec.structs.replace(config, model=model), known, progress)
