"""Engines to test with: a legible one that is all arithmetic, and real ones over the tiny model."""

import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio

from aserve.actors.compute import open_compute_thread
from aserve.actors.engine import Engine, open_engine, run_engine
from aserve.actors.here import RanksHere
from aserve.actors.placement import Known
from aserve.actors.placement import Ranks as AnyRanks
from aserve.core.config import Cache, Config, Ranks, Schedule
from aserve.planes.inline import compute_inline
from aserve.tensor.collective import LayerPlane
from aserve.testing.legible import LegibleOutward, LegibleRunner, LegibleWork
from aserve.text.tokenizer import load_tokenizer

OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]


class Legible:
    """What a legible engine is to do wrong: a rank dies at step `fails_at` of a start, of the
    first `failures` starts only; and at any step whose rows hold `poison`."""

    def __init__(self, fails_at: int, failures: int, poison: int) -> None:
        self.fails_at, self.failures, self.poison = fails_at, failures, poison
        self.starts = 0


class PoisonedRunner(LegibleRunner):
    poison = -1

    def forward(self, work: LegibleWork, inward: None) -> LegibleOutward:
        if self.poison >= 0 and any(self.poison in view.rows.tokens for view in work.views):
            raise ArithmeticError("poisoned")
        return super().forward(work, inward)


class GatedRanks(RanksHere):
    """Ranks that start when the gate is open; it closes behind them."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.gate = trio.Event()
        self.gate.set()
        self.knocked = trio.Event()  # somebody wanted in while it was closed

    @asynccontextmanager
    async def open_ranks(self, pages_total: int | None) -> AsyncIterator[AnyRanks]:
        if not self.gate.is_set():
            self.knocked.set()
        await self.gate.wait()
        self.gate = trio.Event()
        async with super().open_ranks(pages_total) as ranks:
            yield ranks


@pytest.fixture
def open_legible(tiny_model_path: pathlib.Path) -> OpenEngine:
    """An engine whose model is `aserve.testing.legible`; every step is computed inline.

    See `Legible` for faults; other arguments are those of Schedule and Ranks.
    """
    tokenizer = load_tokenizer(tiny_model_path)

    @asynccontextmanager
    async def opened(
        *,
        pages: int = 256,
        threaded: bool = False,
        faults: tuple[int, int, int] = (-1, 10**9, -1),
        restarts_max: int = 3,
        gated: bool = False,
        plane_s: float = 10.0,
        **schedule: Any,
    ) -> AsyncIterator[Engine]:
        page_size, fault = 4, Legible(*faults)
        config = Config(
            schedule=Schedule(**schedule),
            cache=Cache(page_size=page_size),
            ranks=Ranks(restarts_max=restarts_max, plane_s=plane_s),
        )
        known = Known("legible", 256, tokenizer.vocab_size, tokenizer)

        def make(rank: int, plane: LayerPlane, pages_total: int) -> LegibleRunner:
            fault.starts += 1
            fails_at = fault.fails_at if fault.starts <= fault.failures else -1
            runner = PoisonedRunner(page_size, pages_total, tokenizer.vocab_size, fails_at)
            runner.poison = fault.poison
            return runner

        async with AsyncExitStack() as stack:
            compute: Any = compute_inline
            if threaded:
                compute = await stack.enter_async_context(open_compute_thread())
            kind = GatedRanks if gated else RanksHere
            placement = kind(config, known, make, [compute], pages)
            yield await stack.enter_async_context(run_engine(config, placement))

    return opened


@pytest.fixture
def open_tiny(tiny_model_path: pathlib.Path) -> OpenEngine:
    """A real engine over the tiny model; arguments are overrides of the configuration."""

    def opened(**overrides: Any) -> AbstractAsyncContextManager[Engine]:
        settings = {"compute__threads": 1, "cache__kv_tokens": 4096} | overrides
        return open_engine(tiny_model_path, **settings)

    return opened


async def wait_answered(engine: Engine) -> None:
    """Until every rank has reported every step: clients may have all their tokens before."""
    with trio.fail_after(10):
        while engine._leader.awaited:
            await engine.wait_progress()
