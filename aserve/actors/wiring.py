"""Which plane carries what between ranks in processes: decided once by the leader, obeyed by all.

Sums go through shared memory where a stage lives on one host, through torch.distributed elsewhere.
Hidden states go over sockets between processes of one leader, else through torch.distributed.
"""

import os
import pathlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from functools import partial

import trio
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.core.message import Ready, Setup
from aserve.errors import ConfigError
from aserve.planes.hidden import HiddenEnd, OnlyStage
from aserve.planes.hidden_bundle import Neighbours
from aserve.planes.hidden_stream import open_hidden_listener, open_stream_hidden
from aserve.planes.hidden_torch import open_torch_hidden
from aserve.planes.layer import LayerEnd
from aserve.planes.shared_memory import open_shared_memory_plane
from aserve.planes.terms import Terms
from aserve.planes.torch_exchange import Network
from aserve.planes.torch_plane import open_torch_plane
from aserve.wire.address import Unix, parse_address
from aserve.wire.listener import Listener

# Planes of Ready.addresses and Setup.addresses.
HOST, STORE, LAYER, HIDDEN = "host", "store", "layer", "hidden"
SHARED_MEMORY, TORCH = "shared_memory:", "torch:"
FAREWELL = Setup(addresses=(("farewell", 0, ""),))  # before an end that is for good
SHARED_FOLDER = "/dev/shm"

Addresses = tuple[tuple[str, int, str], ...]


def segment_name(run: str) -> str:
    """Of the shared memory of one start of the grid."""
    return f"aserve-{run}"


def wires(config: Config, readies: Sequence[Ready], run: str) -> Addresses:
    """What every rank must know of all: how each stage sums, where its next stage is, and torch's
    store.

    Raises ConfigError if `ranks.layer_plane` asks for what cannot be.
    """
    grid = Grid(config.layout)
    said = [dict(ready.addresses) for ready in readies]
    made: list[tuple[str, int, str]] = []
    for stage in range(grid.pp):
        ranks = range(stage * grid.tp, (stage + 1) * grid.tp)
        hosts = dict.fromkeys(said[rank][HOST] for rank in ranks)
        kind = layer_kind(config, list(hosts))
        name = kind + (segment_name(run) if kind == SHARED_MEMORY else "")
        made += [(LAYER, rank, name) for rank in ranks]
    made += [(HIDDEN, rank, one[HIDDEN]) for rank, one in enumerate(said) if HIDDEN in one]
    made += [(STORE, rank, one[STORE]) for rank, one in enumerate(said) if STORE in one]
    return tuple(made)


def layer_kind(config: Config, hosts: Sequence[str]) -> str:
    """Of one stage, whose ranks live on `hosts`."""
    wanted = config.ranks.layer_plane
    if wanted == "shared_memory" and len(hosts) > 1:
        raise ConfigError(
            f"ranks.layer_plane is shared_memory, but a stage lives on {', '.join(hosts)}: take "
            "auto, or place all ranks of a stage on one host"
        )
    return TORCH if wanted == "torch" or len(hosts) > 1 else SHARED_MEMORY


def address_of(setup: Setup, plane: str, rank: int) -> str | None:
    return next((text for name, of, text in setup.addresses if (name, of) == (plane, rank)), None)


def this_host() -> str:
    """Equal for processes that can share memory: one kernel, one /dev/shm."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{os.uname().nodename} ({boot[:8]}, {os.stat(SHARED_FOLDER).st_dev})"


class Meeting:
    """Where one process can be reached by its peers, before anybody knows anybody.

    `host` is its address as they see it. Processes of one leader have a `folder` that is theirs
    alone; without one the hidden plane is torch's.
    """

    def __init__(self, terms: Terms, host: str, folder: str | None = None) -> None:
        self.terms = terms
        self.host = host
        self.folder = folder
        self.listener: Listener | None = None
        self._store: Store | None = None

    @asynccontextmanager
    async def opened(self, config: Config, rank: int) -> AsyncIterator[tuple[tuple[str, str], ...]]:
        """For one start of the grid; what to tell the leader."""
        beside = Neighbours.of(Grid(config.layout), rank)
        told = [(HOST, this_host())]
        async with AsyncExitStack() as stack:
            if self.folder is not None and beside.previous is not None:
                address = Unix(os.path.join(self.folder, f"hidden-{rank}"))
                opening = open_hidden_listener(address, self.terms, beside)
                self.listener = await stack.enter_async_context(opening)
                told.append((HIDDEN, str(self.listener.address)))
            if rank == 0:
                told.append((STORE, self._open_store()))
            try:
                yield tuple(told)
            finally:
                self.listener = self._store = None

    def _open_store(self) -> str:
        """torch's meeting place: a file among processes of one leader, a port between hosts."""
        if self.folder is not None:
            return os.path.join(self.folder, "store")
        store = TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        self._store = store
        return f"{self.host} {store.port}"

    async def network(self, setup: Setup, limit_s: float) -> Network:
        """What torch.distributed needs to open a plane."""
        if self._store is None:
            found = address_of(setup, STORE, 0)
            assert found is not None, "rank 0 told no store"
            self._store = await trio.to_thread.run_sync(self._reach, found, limit_s)
        return Network(self._store, self.host)

    def _reach(self, found: str, limit_s: float) -> Store:
        if self.folder is not None:
            return FileStore(found, self.terms.world)
        host, port = found.split()
        timeout = timedelta(seconds=limit_s)
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


@asynccontextmanager
async def open_planes(
    config: Config, setup: Setup, rank: int, meeting: Meeting
) -> AsyncIterator[tuple[LayerEnd, HiddenEnd]]:
    """A rank's ends of both planes between ranks, as the leader wired them."""
    grid, limit_s = Grid(config.layout), config.ranks.plane_s
    kind, _, name = (address_of(setup, LAYER, rank) or "").partition(":")
    async with AsyncExitStack() as stack:
        if kind + ":" == SHARED_MEMORY:
            layer = open_shared_memory_plane(name, grid, rank, limit_s=limit_s)
        else:
            network = await meeting.network(setup, limit_s)
            opening = partial(open_torch_plane, grid, rank, network, limit_s=limit_s)
            layer = await trio.to_thread.run_sync(opening)
        await stack.enter_async_context(layer)
        if grid.pp == 1:
            yield layer, OnlyStage()
            return
        beside = Neighbours.of(grid, rank)
        if meeting.folder is None:
            network = await meeting.network(setup, limit_s)
            meeting_next = open_torch_hidden(
                beside,
                network.store,
                in_flight_max=meeting.terms.in_flight_max,
                limit_s=limit_s,
                host=meeting.host,
            )
            yield layer, await stack.enter_async_context(meeting_next)
            return
        following = None if beside.next is None else address_of(setup, HIDDEN, beside.next)
        connecting = open_stream_hidden(
            beside,
            meeting.terms,
            listener=meeting.listener,
            following=None if following is None else parse_address(following),
            limit_s=limit_s,
        )
        yield layer, await stack.enter_async_context(connecting)
