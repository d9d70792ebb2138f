"""Starts the engine's own tasks and turns the death of one into a fact the leader can act on."""

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

import trio

logger = logging.getLogger("aserve.engine")


async def run_guarded(
    name: str, run: Callable[[], Awaitable[None]], failed: Callable[[str], None]
) -> None:
    """Run `run()`; whatever it raises (cancellation apart) is logged and told to `failed`.

    One of the two places where any exception is caught: clients of a dead rank must hear an
    error instead of waiting for ever.
    """
    try:
        await run()
    except Exception as error:
        logger.exception("%s died", name)
        failed(f"{name} died: {type(error).__name__}: {error}")


class ServiceNursery:
    """A nursery for tasks that serve a block of the user's and end with it.

    What the block raises leaves as it is, in no exception group: these tasks are no peers of it.
    """

    def __init__(self) -> None:
        self._manager = trio.open_nursery()

    async def __aenter__(self) -> trio.Nursery:
        self._nursery = await self._manager.__aenter__()
        return self._nursery

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._nursery.cancel_scope.cancel()
        await self._manager.__aexit__(None, None, None)
