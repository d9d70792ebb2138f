"""One HTTP request from its first byte to its log line, and what may end it early."""

import re
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio
from starlette.types import Receive

from aserve.api.body import ClientGone
from aserve.errors import RequestError

REQUEST_ID = re.compile(r"[!-~]{1,128}")


class Call:
    """What the edge, the endpoints and the log know about one request."""

    def __init__(self, method: str, path: str, offered_id: str | None) -> None:
        valid = offered_id is not None and REQUEST_ID.fullmatch(offered_id) is not None
        self.request_id: str = offered_id if valid and offered_id else secrets.token_hex(12)
        self.method = method
        self.path = path
        self.status = 0
        self.event_stream = False
        self.body_len = 0
        self.started_at = trio.current_time()
        self.first_at: float | None = None
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.error: str | None = None
        self._ended_by: RequestError | ClientGone | None = None
        self._scope: trio.CancelScope | None = None

    def end(self, why: RequestError | ClientGone) -> None:
        """Stop what is being done for this request; the first reason counts."""
        self._ended_by = self._ended_by or why
        if self._scope is not None:
            self._scope.cancel()

    @asynccontextmanager
    async def watched(self, receive: Receive, limit_s: float) -> AsyncIterator[trio.Nursery]:
        """The work for this request; over when the client hangs up or the limit has passed.

        Left before the last message of a response is sent: Hypercorn closes the connection inside
        that send, and a task cancelled in there would leave the connection behind. Raises what
        ended the work, or the one exception the work raised.
        """
        finished = False
        try:
            async with trio.open_nursery() as nursery:
                self._scope = nursery.cancel_scope
                if self._ended_by is not None:
                    self._scope.cancel()
                nursery.cancel_scope.deadline = trio.current_time() + limit_s
                nursery.start_soon(self._wait_hangup, receive)
                yield nursery
                finished = True
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        finally:
            self._scope = None
        if finished:
            return
        if self._ended_by is not None:
            raise self._ended_by
        raise RequestError(
            f"The request took longer than {limit_s:g} s.", status=503, code="request_timeout"
        )

    async def _wait_hangup(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientGone())


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception in nested groups of one; the group itself if there is more to tell."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
