"""Ranks of a cluster: an existing launcher started one process each; rank 0 also leads.

aserve starts and ends none of them. Followers come back by themselves when the grid is started
anew, with the weights they have; a process that died is the launcher's to start again.
"""

import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

import trio

from aserve.actors.compute import ComputeThread, open_compute_thread
from aserve.actors.following import Follower
from aserve.actors.launch import cause_of_end, run_as_rank
from aserve.actors.loading import Progress, load, load_known
from aserve.actors.muster import muster
from aserve.actors.placement import Known, Placement, Ranks, in_flight_max
from aserve.actors.processes import silent_s
from aserve.actors.rendezvous import LOOPBACK, Berth, berth
from aserve.actors.wiring import FAREWELL, Meeting, segment_name
from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.errors import ConfigError, PeerError
from aserve.planes.request import LeaderEnd
from aserve.planes.request_stream import open_follower, open_leader
from aserve.planes.shared_memory import remove_shared_memory
from aserve.planes.terms import Terms
from aserve.wire.address import Tcp
from aserve.wire.hello import Refusal

logger = logging.getLogger("aserve.engine")

PAUSE_S = 0.2  # before a follower comes back
LEAVE_S = 2.0  # for followers to leave at the end


def berth_of(config: Config, environment: Mapping[str, str] = os.environ) -> Berth:
    """This process's berth. Raises ConfigError if the launcher's world is not the layout's."""
    found = berth(environment)
    world = Grid(config.layout).world
    if found.world != world:
        raise ConfigError(
            f"{found.launcher} runs {found.world} processes, the layout needs layout.pp * layout.tp"
            f" = {world}"
        )
    return found


def follows(config: Config, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process only follows: then `follow` is all it does."""
    return config.ranks.live == "cluster" and berth_of(config, environment).rank > 0


def _terms(config: Config, place: Berth) -> Terms:
    return Terms(place.world, in_flight_max(config), place.secret)


def own_address(host: str, port: int) -> str:
    """The address of this process as those see it who reach `host` as we do."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect((host, port))  # sends nothing: the kernel chooses the way
        address: str = s.getsockname()[0]
    return address


class RankCluster:
    """A placement, in the process of rank 0: it waits for the others and obeys like them."""

    def __init__(self, config: Config, place: Berth, known: Known, follower: Follower) -> None:
        self.known = known
        self._config = config
        self._place = place
        self._follower = follower

    @asynccontextmanager
    async def open_ranks(self, pages_total: int | None) -> AsyncIterator[Ranks]:
        """See `Placement`."""
        config, place = self._config, self._place
        terms = _terms(config, place)
        # To be reached from elsewhere it must listen on every address: the name the others use may
        # be that of a service in front of us.
        host = place.host if place.host in LOOPBACK else _all_addresses(place.host)
        run = os.urandom(6).hex()
        try:
            async with (
                open_leader(Tcp(host, place.port), terms) as end,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(run_as_rank, 0, partial(self._obey, terms))
                logger.info("waiting for %d ranks at %s:%d", place.world, place.host, place.port)
                pages = await muster(end, config, pages_total, run)
                watch = partial(end.watch, silent_s(config))
                yield Ranks(end, pages, watch, partial(_dismiss, end))
                nursery.cancel_scope.cancel()
        finally:
            remove_shared_memory(segment_name(run), Grid(config.layout))

    async def _obey(self, terms: Terms) -> None:
        await _Joining(self._follower, self._config, self._place, terms).once()


async def _dismiss(end: LeaderEnd) -> None:
    end.send_setup(FAREWELL)
    end.close()
    await end.wait_left(LEAVE_S)


class _Joining:
    """A rank's way to its leader, once for each start of the grid."""

    def __init__(self, follower: Follower, config: Config, place: Berth, terms: Terms) -> None:
        self.joined = False
        self._follower = follower
        self._config = config
        self._place = place
        self._terms = terms

    async def once(self) -> None:
        """From joining to the end of this start."""
        self.joined = False
        place, limit_s = self._place, self._config.ranks.start_s
        # Rank 0 is at home: the name that others use may be that of a service before it.
        host = place.host if place.rank or place.host in LOOPBACK else _home(place.host)
        address = Tcp(host, place.port)
        if place.rank:
            logger.info("rank %d of %d: joining rank 0 at %s", place.rank, place.world, address)
        async with open_follower(address, self._terms, place.rank, limit_s=limit_s) as end:
            self.joined = True
            mine = await trio.to_thread.run_sync(own_address, place.host, place.port)
            await self._follower.obey(end, Meeting(self._terms, mine), self._config)


def _all_addresses(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"


def _home(host: str) -> str:
    return "::1" if ":" in host else "127.0.0.1"


@asynccontextmanager
async def open_cluster(config: Config, progress: Progress | None) -> AsyncIterator[Placement]:
    """In the process of rank 0."""
    place = berth_of(config)
    if place.rank:
        raise ConfigError(
            f"this is rank {place.rank} of {place.world}, and only rank 0 of a cluster has an "
            "engine; start the others with `aserve serve`"
        )
    async with open_compute_thread("aserve-rank-0") as compute:
        known, _ = await load(compute, partial(load_known, config), progress)
        yield RankCluster(config, place, known, _follower(place, compute, progress))


def _follower(place: Berth, compute: ComputeThread, progress: Progress | None) -> Follower:
    return Follower(place.rank, (place.local_rank, place.n_local), compute, progress)


async def follow(
    config: Config,
    progress: Progress | None = None,
    on_serving: Callable[[bool], None] = lambda serves: None,
) -> None:
    """A process that is no leader: obey, and come back whenever the grid starts anew.

    `on_serving` is told when it begins to obey plans, and when it ceases. Returns when the leader
    has said that it is over. Raises PeerError if the leader is not reached within `ranks.start_s`
    or refuses us, ConfigError for what the operator has to mend.
    """
    place = berth_of(config)
    async with open_compute_thread(f"aserve-rank-{place.rank}") as compute:
        follower = _follower(place, compute, progress)
        follower.on_serving = on_serving
        joining = _Joining(follower, config, place, _terms(config, place))
        while not follower.dismissed:
            error = await cause_of_end(joining.once)
            if follower.dismissed:
                return
            if isinstance(error, ConfigError) or not (joining.joined or _passes(error)):
                raise error or PeerError("the leader", "ended before it began")
            logger.warning("rank %d: %s; joining again", place.rank, error or "no more plans")
            await trio.sleep(PAUSE_S)


def _passes(error: Exception | None) -> bool:
    """The leader has not yet noticed that an earlier we is gone."""
    return isinstance(error, Refusal) and "here already" in str(error)
