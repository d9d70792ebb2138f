"""What a client holds: a stream of deltas that waits for the engine and never holds it up.

Deltas a slow consumer has not taken are merged per choice, so a stream holds at most the text of
its own request.
"""

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import outcome
import trio

from aserve.core.message import TokenLogprob
from aserve.core.request import Delta, FinishReason, Usage


class Ending:
    """How a choice ended."""

    __slots__ = ("error", "finish_reason", "stop_reason", "usage")

    def __init__(
        self,
        finish_reason: FinishReason,
        usage: Usage,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        self.finish_reason: FinishReason = finish_reason
        self.usage = usage
        self.stop_reason = stop_reason
        self.error = error


class Pending:
    """News of one choice that nobody has taken yet."""

    __slots__ = ("ending", "logprobs", "prompt_logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.ending: Ending | None = None

    def delta(self, index: int) -> Delta:
        ending = self.ending
        return Delta(
            index=index,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=ending.finish_reason if ending else None,
            stop_reason=ending.stop_reason if ending else None,
            usage=ending.usage if ending else None,
            prompt_logprobs=self.prompt_logprobs,
            error=ending.error if ending else None,
        )


class Shortcut(Protocol):
    """Takes deltas where they are made, while the consumer waits for one: nobody has to wake."""

    def ready(self) -> bool:
        """Whether `push` may be called now; if not, the consumer is woken as usual."""
        ...

    def push(self, delta: Delta) -> None:
        """Must not wait. What it raises is raised in the consumer."""
        ...


class Stream:
    """The mailbox of one request, between the leader (writes) and its consumer (takes).

    With a `shortcut`, deltas before a choice's last reach it instead of a waiting consumer.
    """

    def __init__(self, choices: int) -> None:
        self._pending: list[Pending | None] = [None] * choices
        self._order: deque[int] = deque()
        self._open = choices
        self._waiting: trio.lowlevel.Task | None = None
        self.shortcut: Shortcut | None = None
        self.on_over: Callable[[], object] = lambda: None

    @property
    def over(self) -> bool:
        """Every choice has ended (its last delta may still wait to be taken)."""
        return self._open == 0

    def pending(self, index: int) -> Pending:
        """Where news of choice `index` is written; call `publish` after writing."""
        found = self._pending[index]
        if found is None:
            found = self._pending[index] = Pending()
            self._order.append(index)
        return found

    def publish(self, *, ended: bool) -> None:
        if ended:
            assert self._open > 0
            self._open -= 1
            if self._open == 0:
                self.on_over()
        if self._waiting is not None:
            self._wake(None)

    def put(
        self,
        index: int,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
    ) -> None:
        """Write and publish plain news of choice `index`, which goes on."""
        shortcut = self.shortcut
        if self._waiting is None or shortcut is None or not shortcut.ready():
            pending = self.pending(index)
            pending.text.append(text)
            pending.token_ids.extend(token_ids)
            pending.logprobs.extend(logprobs)
            self.publish(ended=False)
            return
        # Who waits has taken everything before.
        result = outcome.capture(shortcut.push, Delta(index, text, token_ids, logprobs))
        if isinstance(result, outcome.Error):  # the leader must not meet it
            self._wake(result)

    def _wake(self, result: outcome.Error | None) -> None:
        task, self._waiting = self._waiting, None
        assert task is not None
        trio.lowlevel.reschedule(task, outcome.Value(None) if result is None else result)

    def _take(self) -> Delta | None:
        if not self._order:
            return None
        index = self._order.popleft()
        found = self._pending[index]
        assert found is not None
        self._pending[index] = None
        return found.delta(index)

    async def wait_delta(self) -> Delta | None:
        """The next delta, or None when every choice has ended and all was taken."""
        if self._order or self.over:
            await trio.lowlevel.checkpoint()
        while not self._order and not self.over:
            if self._waiting is not None:
                raise trio.BusyResourceError("another task waits for this generation's deltas")
            self._waiting = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(self._give_up)
        return self._take()

    def _give_up(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._waiting = None
        return trio.lowlevel.Abort.SUCCEEDED


class Generation:
    """The deltas of one request, for `async for`. Closing or dropping it aborts what still runs."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        stream: Stream,
        abort: Callable[[], object],
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self.abort = abort  # end what still runs, now
        self._token = trio.lowlevel.current_trio_token()

    @property
    def shortcut(self) -> Shortcut | None:
        """Takes deltas instead of who waits for them, but for those that end a choice."""
        return self._stream.shortcut

    @shortcut.setter
    def shortcut(self, shortcut: Shortcut) -> None:
        self._stream.shortcut = shortcut

    def __aiter__(self) -> "Generation":
        return self

    async def __anext__(self) -> Delta:
        delta = await self._stream.wait_delta()
        if delta is None:
            raise StopAsyncIteration
        return delta

    async def aclose(self) -> None:
        """Abort what still runs; deltas not taken are lost. Closing twice is fine."""
        self.abort()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abort()

    def __del__(self) -> None:
        if self._stream.over:
            return
        try:
            # The last reference may go in any thread; the engine lives in this one.
            self._token.run_sync_soon(self.abort)
        except trio.RunFinishedError:
            return
