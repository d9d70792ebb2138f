"""What the processes of one grid agree on before they meet in a plane."""

import msgspec

from aserve.core.codec import MESSAGE_BYTES_MAX
from aserve.wire.connection import Identity
from aserve.wire.hello import Card


class Terms(msgspec.Struct, frozen=True):
    """`run` tells one start of a grid from another, where ranks of an earlier one may still be
    about and the secret is the same."""

    world: int
    in_flight_max: int
    secret: bytes
    run: str = ""

    def identity(self, role: str, rank: int) -> Identity:
        return Identity(Card(role, rank, self.world, self.run), self.secret, MESSAGE_BYTES_MAX)
