"""The request plane passes the conformance suite in both directions over all its transports."""

from functools import partial

import pytest
import trio
import trio.testing

from aserve.testing.channels import CHECKS, DEADLINE_S, Check
from aserve.testing.pairs import DownPair, UpPair, memory_request, stream_request
from aserve.wire.link import Hop

DIRECTIONS = pytest.mark.parametrize("kind", [DownPair, UpPair])
ALL_CHECKS = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


async def slow(hop: Hop) -> None:
    await trio.sleep(0.001 if hop.target >= 0 else 0.002)


@DIRECTIONS
@ALL_CHECKS
@pytest.mark.parametrize("encoded", [False, True])
async def test_in_one_process(
    kind: type, check: Check, encoded: bool, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(memory_request, kind, encoded=encoded))


@DIRECTIONS
@ALL_CHECKS
async def test_in_one_process_over_links(
    kind: type, check: Check, autojump_clock: trio.testing.MockClock
) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(memory_request, kind, encoded=True, link=slow))


@DIRECTIONS
@ALL_CHECKS
async def test_over_a_unix_socket(kind: type, check: Check, folder: str) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(stream_request, kind, f"unix:{folder}/a.sock"))


@DIRECTIONS
@ALL_CHECKS
async def test_over_tcp(kind: type, check: Check) -> None:
    with trio.fail_after(DEADLINE_S):
        await check(partial(stream_request, kind, "tcp:127.0.0.1:0"))
