"""The thread that runs trio for others: results, errors, interrupts, closing at any moment."""

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from aserve.actors.portal import Portal, PortalClosed


@asynccontextmanager
async def open_number() -> AsyncIterator[int]:
    yield 7


@asynccontextmanager
async def open_nothing() -> AsyncIterator[int]:
    raise FileNotFoundError("nothing there")
    yield 0


async def halve(number: int) -> float:
    await trio.lowlevel.checkpoint()
    return number / 2


async def divide_by_zero() -> float:
    return 1 / 0


def test_calls_return_and_raise_in_the_caller() -> None:
    portal = Portal(open_number, "test")
    assert portal.resource == 7
    assert portal.call(halve, 7) == 3.5
    with pytest.raises(ZeroDivisionError):
        portal.call(divide_by_zero)
    assert portal.call(halve, 8) == 4
    portal.close()


def test_what_opening_raises_comes_out_and_the_thread_ends() -> None:
    before = threading.active_count()
    with pytest.raises(FileNotFoundError, match="nothing there"):
        Portal(open_nothing, "test")
    assert threading.active_count() == before


def test_a_loop_that_cannot_start_is_an_error_and_no_hang() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as file:
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                Portal(open_number, "test")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_forked_child_is_refused_and_ends() -> None:
    script = """
import os
from contextlib import asynccontextmanager
from aserve.actors.portal import Portal, PortalClosed

@asynccontextmanager
async def open_number():
    yield 7

async def answer():
    return 7

portal = Portal(open_number, "test")
child = os.fork()
if child == 0:
    try:
        portal.call(answer)
    except PortalClosed:
        portal.close()
        os._exit(5)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
assert portal.call(answer) == 7
portal.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=30)


def test_closing_ends_the_thread_and_refuses_calls() -> None:
    before = threading.active_count()
    portal = Portal(open_number, "test")
    portal.close()
    portal.close()
    assert threading.active_count() == before
    with pytest.raises(PortalClosed):
        portal.call(halve, 7)


def test_closing_releases_a_caller_who_waits() -> None:
    portal = Portal(open_number, "test")
    waiting = threading.Event()
    caught: list[str] = []

    async def wait() -> None:
        waiting.set()
        await trio.sleep_forever()

    def caller() -> None:
        try:
            portal.call(wait)
        except PortalClosed as error:
            caught.append(str(error))

    thread = threading.Thread(target=caller)
    thread.start()
    waiting.wait()
    portal.close()
    thread.join()
    assert len(caught) == 1


def test_an_interrupt_cancels_the_call_and_leaves_the_portal_usable() -> None:
    portal = Portal(open_number, "test")
    ended: list[str] = []
    main = threading.get_ident()

    async def wait() -> None:
        try:
            signal.pthread_kill(main, signal.SIGINT)
            await trio.sleep_forever()
        finally:
            ended.append("cancelled")

    with pytest.raises(KeyboardInterrupt):
        portal.call(wait)
    assert ended == ["cancelled"]
    assert portal.call(halve, 2) == 1
    portal.close()


def test_many_threads_call_at_once() -> None:
    portal = Portal(open_number, "test")
    found: list[float] = []

    def caller(number: int) -> None:
        found.append(portal.call(halve, number))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    portal.close()
    assert sorted(found) == [number / 2 for number in range(8)]
