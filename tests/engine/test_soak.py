"""Random requests, aborted at random moments: in the end every page is free and nothing is left."""

import gc
import random
import threading

import pytest
import trio
import trio.testing

from aserve.actors.completion import collect
from aserve.actors.engine import Engine
from aserve.core.request import SamplingParams
from aserve.errors import RequestError

from .conftest import OpenEngine

PROMPT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 3

Known = dict[tuple[int, int], tuple[int, ...]]  # the longest answer to a prompt and seed so far


class Client:
    """Asks, reads on and leaves as its dice say; what it reads to the end must be right."""

    def __init__(self, engine: Engine, seed: int, whole: Known) -> None:
        self._engine = engine
        self._dice = random.Random(seed)
        self._whole = whole
        self.counts = {"finished": 0, "left": 0, "refused": 0, "cancelled": 0}

    async def run_until(self, deadline: float, requests_max: int) -> None:
        for _ in range(requests_max):
            if trio.current_time() >= deadline:
                return
            try:
                await self._ask()
            except RequestError as error:
                if error.status != 429:
                    raise
                self.counts["refused"] += 1
                await self._engine.wait_progress()

    async def _ask(self) -> None:
        dice = self._dice
        length, seed = dice.randrange(1, len(PROMPT)), dice.randrange(4)
        params = SamplingParams(
            max_tokens=dice.randrange(1, 80), seed=seed, n=dice.choice((1, 1, 3))
        )
        way = dice.choice(("read", "break", "abort", "cancel", "drop"))
        generation = self._engine.generate(PROMPT[:length], params)
        if way == "read":
            done = await collect(generation, generation.prompt_token_ids, params)
            assert done.error is None
            known = self._whole.get((length, seed), ())
            shared = min(len(known), len(done.token_ids))
            assert known[:shared] == done.token_ids[:shared]
            self._whole[length, seed] = max(known, done.token_ids, key=len)
            self.counts["finished"] += 1
        elif way == "cancel":
            with trio.move_on_after(dice.random() * 0.02):
                await collect(generation, (), params)
            self.counts["cancelled"] += 1
        elif way != "drop":
            for _ in range(dice.randrange(4)):
                if (await anext(generation, None)) is None:
                    break
            if way == "abort":
                self._engine.abort(generation.request_id)
            self.counts["left"] += 1


async def soak(engine: Engine, seconds: float, requests_max: int) -> dict[str, int]:
    """What happened, by kind; raises if anything is left behind."""
    whole: Known = {}
    clients = [Client(engine, seed, whole) for seed in range(24)]
    deadline = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.run_until, deadline, requests_max)
    gc.collect()
    await trio.testing.wait_all_tasks_blocked(0.05)
    statistics = engine.statistics()
    assert statistics.ready
    assert statistics.planner.running == statistics.planner.waiting == 0
    assert statistics.planner.kv_pages_used == 0
    assert engine.flush_cache()
    assert engine.statistics().planner.kv_pages_free == statistics.planner.kv_pages_total
    return {kind: sum(client.counts[kind] for client in clients) for kind in clients[0].counts}


SMALL = {
    "cache__page_size": 4,
    "cache__kv_tokens": 400,
    "schedule__running_max": 12,
    "schedule__waiting_max": 20,
    "schedule__step_tokens": 64,
}


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "requests_max"), [(5.0, 12), (60.0, 10**9)])
async def test_random_aborts_leave_every_page_free(
    open_tiny: OpenEngine, seconds: float, requests_max: int
) -> None:
    threads = threading.active_count()
    async with open_tiny(**SMALL) as engine:
        counts = await soak(engine, seconds, requests_max)
        retractions = engine.statistics().planner.retractions
    assert counts["finished"] > 0, counts
    if seconds > 30:  # what a short run meets depends on how busy the machine is
        assert retractions > 0
        assert min(counts.values()) > 0, counts
    # trio keeps no thread for us: nothing of the engine is left.
    assert threading.active_count() <= threads + 1
