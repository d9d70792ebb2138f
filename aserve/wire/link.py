"""A hook on what travels inside one process: a simulator delays, pauses and cuts links with it."""

from typing import Protocol

import msgspec

from aserve.wire.hello import LEADER


class Hop(msgspec.Struct, frozen=True):
    """One direction of one plane between two ends; LEADER stands for the leader."""

    plane: str
    source: int
    target: int

    def __str__(self) -> str:
        source, target = (
            "the leader" if end == LEADER else f"rank {end}" for end in (self.source, self.target)
        )
        return f"{self.plane} from {source} to {target}"


class Link(Protocol):
    async def __call__(self, hop: Hop) -> None:
        """Awaited before each message is delivered, one after another in a direction, so order is
        kept. Raises PeerError to cut the link: the message is lost, and both ends are told."""
        ...
