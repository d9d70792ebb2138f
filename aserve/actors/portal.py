"""A thread that runs trio for callers who do not: plain programs, threads, notebooks."""

import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

import outcome
import trio

T = TypeVar("T")
Resource = TypeVar("Resource")


class PortalClosed(RuntimeError):
    """The thread behind the portal has ended, or ended while the call ran."""


class Portal(Generic[Resource]):
    """Holds one async resource open in a thread of its own. Any other thread may `call` into it."""

    def __init__(
        self, open_resource: Callable[[], AbstractAsyncContextManager[Resource]], name: str
    ) -> None:
        """Returns when the resource is open; raises what opening it raised."""
        self._open = open_resource
        self._opened: Future[Resource] = Future()
        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None
        self._entered = threading.Event()
        # A daemon: a program that forgets to close must still be able to end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        try:
            self._entered.wait()
            self.resource = self._opened.result()
        except BaseException:
            self.close()
            raise

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """`await function(*args)` in the portal's thread. An interrupt cancels it and waits it out.

        Raises PortalClosed when the portal is closed before or meanwhile.
        """
        if not self._thread.is_alive():  # a forked child has this object but not its thread
            raise PortalClosed("this LLM is closed, or was opened before this process was forked")
        assert self._token is not None
        call: _Call[T] = _Call(function, args)
        try:
            self._token.run_sync_soon(self._start, call)
            return call.result()
        except trio.RunFinishedError:
            raise PortalClosed("this LLM is closed") from None
        except BaseException:
            if not call.done:  # an interrupt in this thread, not an error of the call
                self._token.run_sync_soon(call.cancel)
                call.wait_done()
            raise

    def post(self, function: Callable[[], object]) -> None:
        """Run `function` in the portal's thread before any later call; nothing if it is closed."""
        if self._token is None or not self._thread.is_alive():
            return
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def close(self) -> None:
        """End the resource and the thread. May be repeated, and called from any thread."""
        self._entered.wait()
        self.post(self._scope.cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _start(self, call: "_Call[Any]") -> None:
        if self._scope.cancel_called:
            call.refuse()
        elif not call.done:
            call.started = True
            self._nursery.start_soon(call.run)

    def _run(self) -> None:
        result = outcome.capture(trio.run, self._main)
        if not self._opened.done():
            error = result.error if isinstance(result, outcome.Error) else PortalClosed("closed")
            self._opened.set_exception(error)
        self._entered.set()  # trio itself may not have started, for want of file descriptors

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._entered.set()
        with self._scope:
            async with self._open() as resource:
                await self._serve(resource)

    async def _serve(self, resource: Resource) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._opened.set_result(resource)
            await trio.sleep_forever()


class _Call(Generic[T]):
    """One function on its way through the portal and its result on the way back."""

    def __init__(self, function: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        self._function = function
        self._args = args
        self._future: Future[T] = Future()
        self._scope = trio.CancelScope()
        self.started = False

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        return self._future.result()

    def wait_done(self) -> None:
        self._future.exception()

    def cancel(self) -> None:
        """In the portal's thread. The interrupt may have come before the call was handed over."""
        if self.started:
            self._scope.cancel()
        elif not self.done:
            self.refuse()

    def refuse(self) -> None:
        self._future.set_exception(PortalClosed("this LLM is closed"))

    async def run(self) -> None:
        result: outcome.Maybe[T] | None = None
        try:
            with self._scope:
                result = await _captured(self._function, self._args)
        finally:
            if result is None:
                self.refuse()
            elif isinstance(result, outcome.Error):
                self._future.set_exception(result.error)
            else:
                self._future.set_result(result.unwrap())


async def _captured(
    function: Callable[..., Awaitable[T]], args: tuple[Any, ...]
) -> "outcome.Maybe[T]":
    """The outcome of the call; a cancellation is no outcome and goes on its way."""
    result: outcome.Maybe[T] = await outcome.acapture(function, *args)
    if isinstance(result, outcome.Error) and isinstance(result.error, trio.Cancelled):
        raise result.error
    return result
