"""The hidden plane passes the conformance suite over all its transports."""

from functools import partial

import pytest
import trio
import trio.testing

from aserve.testing.channels import (
    CHECKS,
    DEADLINE_S,
    Check,
    check_sender_leaves,
    check_slow_reader_holds_the_sender_up,
)
from aserve.testing.meetings import MEETINGS
from aserve.testing.pairs import memory_hidden, stream_hidden, torch_hidden
from aserve.wire.link import Hop

LONG = (check_slow_reader_holds_the_sender_up, check_sender_leaves)
ALL_CHECKS = pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=pytest.mark.slow) if check in LONG else check
        for check in (*CHECKS, *MEETINGS)
    ],
    ids=lambda check: check.__name__,
)


async def slow(hop: Hop) -> None:
    await trio.sleep(0.001)


@ALL_CHECKS
@pytest.mark.parametrize("link", [None, slow])
async def test_in_one_process(
    check: Check, link: object, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(memory_hidden, link=link))


@ALL_CHECKS
async def test_over_a_unix_socket(check: Check, folder: str) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(stream_hidden, f"unix:{folder}/a.sock"))


@ALL_CHECKS
async def test_over_tcp(check: Check) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(stream_hidden, "tcp:127.0.0.1:0"))


@pytest.mark.slow
@ALL_CHECKS
async def test_over_torch_distributed(check: Check) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(torch_hidden)
