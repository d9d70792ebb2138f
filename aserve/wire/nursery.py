"""A nursery whose tasks serve a block: they end with it, and its errors leave as they are."""

from types import TracebackType

import trio


class ServiceNursery:
    """`async with ServiceNursery() as nursery`; an error of a task ends the block, in a group.

    What the block raises leaves in no group: these tasks are no peers of it.
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
