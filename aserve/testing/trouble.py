"""What goes wrong in a simulated deployment, and when: links that delay, pause or are cut, ranks
that crash, hang or slow down. All of it by virtual time and one seeded `Random`.
"""

from random import Random

import trio

from aserve.errors import PeerError
from aserve.testing.swarm import Setup, Trouble
from aserve.wire.hello import LEADER
from aserve.wire.link import Hop

BREAKING = ("pause", "cut", "crash", "hang", "slow")  # delays are within every limit


class PlannedCrash(Exception):
    """A rank was told to die."""


class Start:
    """The troubles of one start of the ranks: new ranks have new links, and none of the old ones'
    troubles."""

    def __init__(self, setup: Setup, random: Random) -> None:
        self._setup = setup
        self._random = random
        self._held: dict[Hop, float] = {}  # until when a link carries nothing
        self._cut: set[Hop] = set()
        self._busy_until: dict[int, float] = {}
        self.ended = trio.Event()
        self.n_struck = 0  # troubles that may break these ranks
        self.crashes = [trio.Event() for _ in range(setup.layout.pp * setup.layout.tp)]

    def strike(self, trouble: Trouble) -> None:
        self.n_struck += trouble.kind in BREAKING
        until_s = trio.current_time() + trouble.for_ms / 1e3
        if trouble.kind == "crash":
            self.crashes[trouble.rank].set()
        elif trouble.kind in ("hang", "slow"):
            self._busy_until[trouble.rank] = until_s
        else:
            for hop in hops(trouble):
                if trouble.kind == "cut":
                    self._cut.add(hop)
                else:
                    self._held[hop] = max(until_s, self._held.get(hop, 0.0))

    async def cross(self, hop: Hop) -> None:
        """A `wire.link.Link`."""
        if hop in self._cut:
            raise PeerError(str(hop), "was cut")
        delay_s = self._random.random() * self._setup.link_ms / 1e3
        await trio.sleep_until(max(trio.current_time() + delay_s, self._held.get(hop, 0.0)))
        if hop in self._cut:
            raise PeerError(str(hop), "was cut")

    async def work(self, rank: int, micros: int) -> None:
        """The virtual time that a step takes on a rank."""
        busy_s = micros * (1 + self._random.random() * self._setup.jitter) / 1e6
        at_s = trio.current_time() + busy_s
        await trio.sleep_until(max(at_s, self._busy_until.get(rank, 0.0)))


def hops(trouble: Trouble) -> tuple[Hop, ...]:
    """Both directions between a rank and the leader, or the one way to the next stage."""
    if trouble.peer < 0:
        rank = trouble.rank
        return Hop("request", LEADER, rank), Hop("request", rank, LEADER)
    return (Hop("hidden", trouble.rank, trouble.peer),)
