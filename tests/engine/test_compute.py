"""The compute thread: one thread, in order, waited out when cancelled, joined at the end."""

import sys
import threading

import pytest
import trio

from aserve.actors.compute import open_compute_thread


async def test_every_job_runs_on_the_same_other_thread() -> None:
    async with open_compute_thread() as compute:
        names = {await compute(threading.get_ident) for _ in range(5)}
    assert len(names) == 1
    assert threading.get_ident() not in names


async def test_a_result_and_an_error_come_back() -> None:
    async with open_compute_thread() as compute:
        assert await compute(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await compute(divmod, 1, 0)
        assert await compute(divmod, 9, 2) == (4, 1)


async def test_cancellation_waits_for_the_job_and_is_seen_by_it() -> None:
    started, release = threading.Event(), threading.Event()
    ended: list[bool] = []

    def job() -> None:
        started.set()
        release.wait()
        ended.append(compute.cancelled)

    async with open_compute_thread() as compute, trio.open_nursery() as nursery:
        nursery.start_soon(compute, job)
        while not started.is_set():
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
        await trio.lowlevel.cancel_shielded_checkpoint()
        await trio.lowlevel.cancel_shielded_checkpoint()
        release.set()
    assert ended == [True]


async def test_the_thread_ends_with_its_block() -> None:
    before = threading.active_count()
    async with open_compute_thread("aserve-test") as compute:
        await compute(int)
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


async def test_threads_switch_sooner_until_the_last_block_ends_in_any_order() -> None:
    before = sys.getswitchinterval()
    first, second = open_compute_thread(), open_compute_thread()
    await first.__aenter__()
    await second.__aenter__()
    await first.__aexit__(None, None, None)
    assert sys.getswitchinterval() < before
    await second.__aexit__(None, None, None)
    assert sys.getswitchinterval() == before
