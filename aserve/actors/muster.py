"""How a leader brings ranks in other processes to obey it: they join, load, agree, meet, and wait
for plans."""

import msgspec
import trio

from aserve.actors.rank import IDLE
from aserve.actors.wiring import wires
from aserve.core.config import Config
from aserve.core.message import Ready, Setup
from aserve.errors import ConfigError, PeerError, PlaneTimeout, RankDied
from aserve.planes.request import LeaderEnd

POLL_FIRST_S, POLL_LAST_S = 0.005, 0.1
ANSWER_S = 1.0


async def muster(end: LeaderEnd, config: Config, pages_total: int | None, run: str) -> int:
    """Returns when every rank waits for plans; the pages of each one's pools.

    Raises PlaneTimeout naming who was not there within `ranks.start_s`, RankDied, PeerError where
    ranks differ in what they must have in common, ConfigError where that is what a rank died of.
    """
    limit_s = config.ranks.start_s
    try:
        await end.wait_joined(limit_s)
        end.send_setup(Setup(config=msgspec.json.encode(config)))
        readies = await end.wait_ready(limit_s)
        check_alike(readies)
        pages = pages_total or min(ready.pages for ready in readies)
        end.send_setup(Setup(pages_total=pages, addresses=wires(config, readies, run)))
        await _wait_idle(end, len(readies), limit_s)
    except RankDied as error:
        raise operators(error) from error
    return pages


async def _wait_idle(end: LeaderEnd, world: int, limit_s: float) -> None:
    """Planes are opened by all ranks together, which may fail; only then is there no more to."""
    missing = set(range(world))
    pause_s = POLL_FIRST_S
    with trio.move_on_after(limit_s):
        while missing:
            end.check()
            for state in await end.ask_states(ANSWER_S):
                if state.doing.startswith(IDLE):
                    missing.discard(state.rank)
            if missing:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, POLL_LAST_S)
        return
    names = ", ".join(map(str, sorted(missing)))
    raise PlaneTimeout(missing, f"ranks {names} did not meet their peers within {limit_s:g} s")


def check_alike(readies: tuple[Ready, ...]) -> None:
    """Raises PeerError naming the rank and what differs from rank 0."""
    first = readies[0]
    for ready in readies[1:]:
        if ready.model != first.model:
            raise PeerError(
                f"rank {ready.rank}", f"has another model: {ready.model}, rank 0 {first.model}"
            )
        if ready.config_digest != first.config_digest:
            raise PeerError(f"rank {ready.rank}", "has another configuration than rank 0")


def operators(error: RankDied) -> RankDied | ConfigError:
    """A rank's ConfigError is the operator's to act on, wherever it was found."""
    kind, _, what = str(error).partition(" died: ")[2].partition(": ")
    return ConfigError(what) if kind in ("ConfigError", "ModelError") else error
