"""A rank in a process of its own: it joins the leader, loads, meets its peers, and obeys."""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch
import trio

from aserve.actors.child import Summons
from aserve.actors.compute import ComputeThread, open_compute_thread
from aserve.actors.loading import Progress, RankModel, Share, cores, load, load_known, load_rank
from aserve.actors.placement import Known, threads_each
from aserve.actors.rank import Watch, run_rank, state_of
from aserve.actors.wiring import FAREWELL, Meeting, open_planes
from aserve.core.config import Config
from aserve.core.message import RankState, Ready
from aserve.errors import PeerError
from aserve.planes.hidden import HiddenEnd
from aserve.planes.layer import LayerEnd
from aserve.planes.request import FollowerEnd
from aserve.planes.request_stream import open_follower
from aserve.planes.terms import Terms
from aserve.wire.address import parse_address

HEAR_S = 0.1

# What ranks of one grid may differ in: where each one is, and what only a leader reads.
OWN = {
    "model": ("path", "name", "context_len", "chat_template", "tool_parser", "reasoning_parser"),
    "ranks": ("start_s", "restarts_max"),
    "schedule": None,
    "cache": ("kv_tokens", "kv_mib_max"),
    "compute": ("threads",),
    "limits": None,
    "server": None,
}


class Follower:
    """One rank, through any number of starts of the grid; its weights stay."""

    def __init__(
        self, rank: int, local: tuple[int, int], compute: ComputeThread, progress: Progress | None
    ) -> None:
        """`local` is this process's place among how many of its host."""
        self.rank = rank
        self._index, self._n_local = local
        self._compute = compute
        self._progress = progress
        self._loaded: tuple[Known, RankModel] | None = None
        self.dismissed = False  # the leader has said that it needs no rank any more
        self.on_serving: Callable[[bool], None] = lambda serves: None  # plans come, or no more

    async def obey(self, end: FollowerEnd, meeting: Meeting, own: Config | None) -> None:
        """One start of the grid. `own` must agree with the leader's configuration; None takes that.

        Raises PeerError naming what differs, and whatever breaks a plane.
        """
        watch = Watch()
        end.state = lambda: RankState(self.rank, -1, 0, doing=watch.sentence())
        setup = await end.wait_setup()
        config = msgspec.json.decode(setup.config, type=Config)
        if own is not None:
            check_same(own, config)
            config = own
        watch.now("loading")
        known, model = await self._load(config)
        async with meeting.opened(config, self.rank) as addresses:
            ready = Ready(
                self.rank, model.pages, model.fingerprint, model.n_layers, shared(config), addresses
            )
            await end.ready(ready)
            watch.now("waiting for the other ranks")
            setup = await end.wait_setup()
            async with open_planes(config, setup, self.rank, meeting) as (layer, hidden):
                make = partial(model.runner, known.tokenizer, layer, setup.pages_total)
                runner = await self._compute(make)
                end.state = partial(state_of, self.rank, watch, runner, layer)
                self.on_serving(True)
                try:
                    await _obey(end, runner, (layer, hidden), self._compute, watch)
                finally:
                    self.on_serving(False)
                    await self._hear_farewell(end)

    async def _hear_farewell(self, end: FollowerEnd) -> None:
        """It came before the leader's end, if it came."""
        with trio.move_on_after(HEAR_S), suppress(PeerError):
            self.dismissed = (await end.wait_setup()) == FAREWELL

    async def _load(self, config: Config) -> tuple[Known, RankModel]:
        if self._loaded is None:
            threads = threads_each(config.compute.threads or cores(), self._n_local)[self._index]
            torch.set_num_threads(threads)
            share = Share(self.rank, self._n_local, threads)
            known, path = await load(self._compute, partial(load_known, config), self._progress)
            work = partial(load_rank, config, path, known.context_len, share)
            self._loaded = known, await load(self._compute, work, self._progress)
        return self._loaded


async def _obey(
    end: FollowerEnd,
    runner: Any,
    planes: tuple[LayerEnd, HiddenEnd],
    compute: ComputeThread,
    watch: Watch,
) -> None:
    """Until there are no more plans. Whoever waits for a peer is told when the leader is gone."""
    layer, hidden = planes

    async def tell() -> None:
        reason = await end.wait_closed()
        layer.abort(reason)
        hidden.abort(reason)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(tell)
        try:
            await run_rank(runner, end, hidden, compute, watch)
        finally:
            layer.abort("this rank is ending")
            nursery.cancel_scope.cancel()


def shared(config: Config) -> str:
    """What must be equal on every rank, as JSON."""
    table: dict[str, Any] = msgspec.to_builtins(config)
    for section, names in OWN.items():
        for name in tuple(table[section]) if names is None else names:
            del table[section][name]
    return msgspec.json.encode(table, order="sorted").decode()


def check_same(own: Config, leaders: Config) -> None:
    """Raises PeerError naming every key that differs."""
    mine, theirs = msgspec.json.decode(shared(own)), msgspec.json.decode(shared(leaders))
    found = [
        f"{section}.{name} is {value!r} here, {theirs[section][name]!r} there"
        for section, table in mine.items()
        for name, value in table.items()
        if value != theirs[section][name]
    ]
    if found:
        raise PeerError("the leader", f"has another configuration: {'; '.join(found)}")


async def follow_once(summons: Summons, progress: Progress) -> None:
    """A process that its leader started: one start of the grid, on the leader's host."""
    terms = Terms(summons.world, summons.in_flight_max, summons.secret, summons.run)
    address = parse_address(summons.address)
    folder = os.path.dirname(getattr(address, "path", ""))
    meeting = Meeting(terms, "127.0.0.1", folder=folder)
    async with open_compute_thread("aserve-rank") as compute:
        local = summons.rank, summons.world
        follower = Follower(summons.rank, local, compute, progress)
        async with open_follower(address, terms, summons.rank, limit_s=summons.start_s) as end:
            await follower.obey(end, meeting, None)
