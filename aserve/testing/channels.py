"""One conformance suite for what carries messages between two ends: request and hidden planes over
every transport pass the same checks. The ends are real; `aserve.testing.pairs` opens them.

Nothing sleeps: a memory transport runs under a mock clock, a real one is waited for by events.
"""

import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import trio
import trio.testing

from aserve.wire.address import Address, Tcp, Unix


class PlannedDeath(Exception):
    """What an end under test dies of."""


class Pair(Protocol):
    """One direction between two open ends. Message `number` of a given size has one meaning."""

    in_flight_max: int
    slack: int  # messages that a transport may hold beyond `in_flight_max`
    settle_s: float  # of a mock clock, until links have carried all they will
    sender: str  # as an error on the other side names it
    receiver: str
    address: Address | None  # where strangers can knock
    on_sender_left: type[Exception]  # what the receiver gets then, and so on
    on_sender_died: type[Exception]
    on_receiver_left: type[Exception]
    on_receiver_died: type[Exception]

    async def send(self, number: int, size: int) -> None:
        """May wait while too many are on their way."""
        ...

    async def receive(self, number: int, size: int) -> None:
        """The next message, which must be this one; fails if it is another."""
        ...

    async def hear_of_receiver(self) -> None:
        """On the sender's side: go on until the plane says that the receiver is gone."""
        ...

    def leave_sender(self, error: Exception | None = None) -> None:
        """The sending end's block starts to end, with an error if there is one."""
        ...

    def leave_receiver(self, error: Exception | None = None) -> None: ...


OpenPair = Callable[..., AbstractAsyncContextManager[Pair]]  # limit_s=...
Check = Callable[[OpenPair], Awaitable[None]]

# A real transport's events come within this, or the check fails instead of hanging.
DEADLINE_S = 20.0
SMALL, LARGE, HUGE = 16, 1 << 18, 6 << 20


async def check_channel(open_pair: OpenPair) -> None:
    """Every check, each on a fresh pair. Raises AssertionError naming what does not hold."""
    for check in CHECKS:
        try:
            with trio.fail_after(DEADLINE_S):
                await check(open_pair)
        except Exception as error:
            raise AssertionError(f"{check.__name__}: {error!r}") from error


async def check_order_and_no_loss(open_pair: OpenPair) -> None:
    seeded = random.Random(1)
    sizes = [seeded.choice((1, SMALL, 1000, 5000)) for _ in range(60)]
    async with open_pair() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(_send_all, pair, sizes)
        await _receive_all(pair, sizes)


async def check_many_in_flight(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        for start in range(0, 3 * pair.in_flight_max, pair.in_flight_max):
            numbers = range(start, start + pair.in_flight_max)
            for number in numbers:
                await pair.send(number, SMALL)
            for number in numbers:
                await pair.receive(number, SMALL)


async def check_big_messages(open_pair: OpenPair) -> None:
    sizes = [LARGE, 1, 4 * LARGE, LARGE]
    async with open_pair() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(_send_all, pair, sizes)
        await _receive_all(pair, sizes)


async def check_slow_reader_holds_the_sender_up(open_pair: OpenPair) -> None:
    """However much is to be sent, only so much is on its way; then all of it comes."""
    async with open_pair() as pair, trio.open_nursery() as nursery:
        sizes = [4 * LARGE] * (2 * pair.in_flight_max + pair.slack + 4)
        sent: list[int] = []
        nursery.start_soon(_send_all, pair, sizes, sent)
        await trio.sleep(pair.settle_s)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert pair.in_flight_max <= len(sent) <= pair.in_flight_max + pair.slack, len(sent)
        await _receive_all(pair, sizes)


async def check_sender_leaves(open_pair: OpenPair) -> None:
    """What was sent is still received, though it be more than a transport can hold; then the end
    is told."""
    async with open_pair() as pair:
        for number in range(pair.in_flight_max):
            await pair.send(number, HUGE)
        pair.leave_sender()
        for number in range(pair.in_flight_max):
            await pair.receive(number, HUGE)
        await _expect(pair.on_sender_left, pair.receive(pair.in_flight_max, SMALL))


async def check_sender_dies_while_it_is_waited_for(open_pair: OpenPair) -> None:
    async with open_pair() as pair, trio.open_nursery() as nursery:
        nursery.start_soon(_expect, pair.on_sender_died, pair.receive(0, SMALL), pair.sender)
        await trio.testing.wait_all_tasks_blocked()
        pair.leave_sender(PlannedDeath("planned"))


async def check_receiver_leaves(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        await pair.send(0, SMALL)
        await pair.receive(0, SMALL)
        pair.leave_receiver()
        await _expect(pair.on_receiver_left, pair.hear_of_receiver())


async def check_receiver_dies(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        pair.leave_receiver(PlannedDeath("planned"))
        await _expect(pair.on_receiver_died, pair.hear_of_receiver(), pair.receiver)


async def check_cancelled_receive_loses_nothing(open_pair: OpenPair) -> None:
    async with open_pair() as pair:
        for number in range(3):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(pair.receive, number, LARGE)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            await pair.send(number, LARGE)
            await pair.receive(number, LARGE)


async def check_receive_cancelled_in_the_middle_goes_on(open_pair: OpenPair) -> None:
    """Wherever in a message it is cancelled: after each number of turns of the loop."""
    async with open_pair() as pair:
        for number in range(12):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pair.send, number, 4 * LARGE)
                with trio.CancelScope() as scope:
                    nursery.start_soon(_cancel_after, scope, number)
                    await pair.receive(number, 4 * LARGE)
                if scope.cancelled_caught:
                    await pair.receive(number, 4 * LARGE)


async def check_cancelled_send_is_sent_once_or_never(open_pair: OpenPair) -> None:
    """A send that waits for room and is cancelled may be made again, and comes once."""
    async with open_pair() as pair:
        n_sent = 0
        for number in itertools.count():
            assert number <= pair.in_flight_max + pair.slack + 1, "there is no limit"
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when_blocked, scope)
                    await pair.send(number, 4 * LARGE)
                    nursery.cancel_scope.cancel()
            if scope.cancelled_caught:
                break
            n_sent += 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_send_range, pair, range(n_sent, n_sent + 3))
            for number in range(n_sent + 3):
                await pair.receive(number, 4 * LARGE)


async def check_strangers_disturb_nobody(open_pair: OpenPair) -> None:
    """Garbage, half a greeting, silence and a hang-up: messages go on."""
    async with open_pair() as pair:
        if not isinstance(pair.address, Unix | Tcp):
            return
        streams = []
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0\0\0\x05he", b""):
            streams.append(await _knock(pair.address))
            await streams[-1].send_all(data)
        await trio.aclose_forcefully(streams.pop())
        await pair.send(0, SMALL)
        await pair.receive(0, SMALL)
        for stream in streams:
            await trio.aclose_forcefully(stream)
        await pair.send(1, SMALL)
        await pair.receive(1, SMALL)


CHECKS: tuple[Check, ...] = (
    check_order_and_no_loss,
    check_many_in_flight,
    check_big_messages,
    check_slow_reader_holds_the_sender_up,
    check_sender_leaves,
    check_sender_dies_while_it_is_waited_for,
    check_receiver_leaves,
    check_receiver_dies,
    check_cancelled_receive_loses_nothing,
    check_receive_cancelled_in_the_middle_goes_on,
    check_cancelled_send_is_sent_once_or_never,
    check_strangers_disturb_nobody,
)


async def _send_all(pair: Pair, sizes: list[int], sent: list[int] | None = None) -> None:
    for number, size in enumerate(sizes):
        await pair.send(number, size)
        if sent is not None:
            sent.append(number)


async def _send_range(pair: Pair, numbers: range) -> None:
    for number in numbers:
        await pair.send(number, 4 * LARGE)


async def _receive_all(pair: Pair, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        await pair.receive(number, size)


async def _expect(kind: type[Exception], awaited: Awaitable[None], named: str = "") -> None:
    raised: Exception | None = None
    try:
        await awaited
    except kind as error:
        raised = error
    assert raised is not None, f"no {kind.__name__} was raised"
    assert named in str(raised), f"{raised!r} does not name {named}"


async def _cancel_after(scope: trio.CancelScope, n_turns: int) -> None:
    for _ in range(n_turns):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def _cancel_when_blocked(scope: trio.CancelScope) -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)
    scope.cancel()


async def _knock(address: Address) -> trio.SocketStream:
    if isinstance(address, Unix):
        return await trio.open_unix_socket(address.path)
    assert isinstance(address, Tcp)
    return await trio.open_tcp_stream(address.host, address.port)
