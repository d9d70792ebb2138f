"""The conformance suite itself: good pairs pass as a whole, and each way of being bad is named."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio
import trio.testing

from aserve.testing.channels import Pair, check_channel
from aserve.testing.meetings import check_meetings
from aserve.testing.pairs import DownPair, HiddenPair, UpPair, memory_hidden, memory_request


@pytest.mark.slow
async def test_good_pairs_pass(autojump_clock: trio.testing.MockClock) -> None:
    await check_channel(memory_hidden)
    await check_meetings(memory_hidden)
    for kind in (DownPair, UpPair):
        await check_channel(lambda kind=kind: memory_request(kind))


class Bad:
    """A pair whose sender does something else with messages; the rest is that of a good one."""

    def __init__(self, pair: HiddenPair) -> None:
        self.pair = pair

    def __getattr__(self, name: str) -> object:
        return getattr(self.pair, name)


class Loses(Bad):
    async def send(self, number: int, size: int) -> None:
        if number != 7:
            await self.pair.send(number, size)
        await trio.lowlevel.checkpoint()


class Repeats(Bad):
    async def send(self, number: int, size: int) -> None:
        for _ in range(1 + (number == 7)):
            await self.pair.send(number, size)


class Reorders(Bad):
    async def send(self, number: int, size: int) -> None:
        await self.pair.send({3: 4, 4: 3}.get(number, number), size)


class Shortens(Bad):
    async def send(self, number: int, size: int) -> None:
        await self.pair.send(number, min(size, 1000))


class Hoards(Bad):
    """It takes more off the sender's hands than was agreed."""

    in_flight_max = 2


class Forgets(Bad):
    """A message that comes while its receiver is cancelled is lost."""

    async def receive(self, number: int, size: int) -> None:
        try:
            await self.pair.receive(number, size)
        finally:
            await trio.lowlevel.checkpoint()


class Deaf(Bad):
    async def hear_of_receiver(self) -> None:
        await trio.sleep_forever()


class Mute(Bad):
    """It does not say that it ends."""

    def leave_sender(self, error: Exception | None = None) -> None:
        """Nothing happens."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Loses, "check_order_and_no_loss"),
        (Repeats, "check_order_and_no_loss"),
        (Reorders, "check_order_and_no_loss"),
        (Shortens, "check_order_and_no_loss"),
        (Hoards, "check_slow_reader_holds_the_sender_up"),
        (Forgets, "check_receive_cancelled_in_the_middle_goes_on"),
        (Deaf, "check_receiver_leaves"),
        (Mute, "check_sender_leaves"),
    ],
)
async def test_bad_pairs_are_named(
    kind: Callable[[HiddenPair], Pair], check: str, autojump_clock: trio.testing.MockClock
) -> None:
    @asynccontextmanager
    async def bad() -> AsyncIterator[Pair]:
        async with memory_hidden() as pair:
            yield kind(pair)

    opened: Callable[[], AbstractAsyncContextManager[Pair]] = bad
    with pytest.raises(AssertionError, match=check):
        await check_channel(opened)
