"""Engines to test with: a legible one that is all arithmetic, and real ones over the tiny model."""

import pathlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from aserve.actors.compute import compute_inline, open_compute_thread
from aserve.actors.engine import Engine, open_engine, run_engine
from aserve.actors.loading import Loaded
from aserve.core.config import Cache, Config, Schedule
from aserve.core.planner import CacheSpec
from aserve.testing.legible import LegibleRunner
from aserve.text.tokenizer import load_tokenizer

OpenEngine = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def open_legible(tiny_model_path: pathlib.Path) -> OpenEngine:
    """An engine whose model is `aserve.testing.legible`; every step is computed inline.

    `fails_at` is the step at which the rank dies; other arguments are those of Schedule.
    """
    tokenizer = load_tokenizer(tiny_model_path)

    @asynccontextmanager
    async def opened(
        *, pages: int = 256, threaded: bool = False, fails_at: int = -1, **schedule: Any
    ) -> AsyncIterator[Engine]:
        page_size = 4
        config = Config(schedule=Schedule(**schedule), cache=Cache(page_size=page_size))
        loaded = Loaded(
            name="legible",
            context_len=256,
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer,
            cache=CacheSpec(page_size, pages),
            runner=LegibleRunner(page_size, pages, tokenizer.vocab_size, fails_at),
        )
        if threaded:
            async with (
                open_compute_thread() as compute,
                run_engine(config, loaded, compute) as engine,
            ):
                yield engine
        else:
            async with run_engine(config, loaded, compute_inline) as engine:
                yield engine

    return opened


@pytest.fixture
def open_tiny(tiny_model_path: pathlib.Path) -> OpenEngine:
    """A real engine over the tiny model; arguments are overrides of the configuration."""

    def opened(**overrides: Any) -> AbstractAsyncContextManager[Engine]:
        settings = {"compute__threads": 1, "cache__kv_tokens": 4096} | overrides
        return open_engine(tiny_model_path, **settings)

    return opened
