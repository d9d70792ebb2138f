"""Ranks that share one thread: a forward runs in a greenlet, and a collective parks it there.

The trio task that runs the forward awaits the peers meanwhile, so a mock clock drives the limits
and cancellation unwinds a parked forward. The forward itself stays plain synchronous code.
"""

import contextvars
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple

import outcome
import torch
import trio
from greenlet import getcurrent, greenlet
from torch import Tensor

from aserve.core.layout import Grid
from aserve.errors import PlaneError
from aserve.planes import board, signature
from aserve.planes.board import Board, Call, Meeting
from aserve.planes.layer import LayerEnd, planes_on_boards
from aserve.planes.signature import Failure, Signature

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Forward(greenlet):  # type: ignore[misc]  # it has no stubs
    """The greenlet of a function, with the torch modes of the task that resumes it.

    torch keeps inference and gradient mode per thread; a parked forward must not leave its own to
    others.
    """

    def __init__(self, run: Callable[..., object]) -> None:
        super().__init__(run)
        self.gr_context = contextvars.copy_context()
        self.inference = torch.is_inference_mode_enabled()
        self.gradients = torch.is_grad_enabled()


async def compute_inline(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """`function(*args)` in this thread; where it meets peers, this task waits and others run.

    Cancelled while it waits, the function is unwound by the same exception.
    """
    await trio.lowlevel.checkpoint()
    forward = Forward(function)
    result = forward.switch(*args)
    while not forward.dead:
        waited = await outcome.acapture(result)  # what `park` was given
        if isinstance(waited, outcome.Value):
            result = forward.switch()
        else:
            result = forward.throw(waited.error)
    done: T = result
    return done


def park(wait: Callable[[], Awaitable[None]]) -> None:
    """Leave the running forward until `wait()` has been awaited by its task; raises what it
    raises."""
    forward = getcurrent()
    if not isinstance(forward, Forward) or forward.parent is None:
        raise RuntimeError("a rank of an inline plane computes in compute_inline")
    with torch.inference_mode(forward.inference), torch.set_grad_enabled(forward.gradients):
        forward.parent.switch(wait)


class InlineBoard:
    """A stage's board; each open meeting has an event."""

    def __init__(self, limit_s: float) -> None:
        self._board = Board()
        self._limit_s = limit_s
        self._events: dict[Meeting, trio.Event] = {}

    def check(self) -> None:
        self._board.check()

    def meet(self, call: Call) -> Tensor:
        try:
            meeting = self._board.post(call)
        except PlaneError:
            self._wake_all()
            raise
        if meeting.missing:
            self._park(meeting, call.signature)
        else:
            self._complete(meeting, call.signature)
        if meeting.results is None:
            self._board.check()
        assert meeting.results is not None
        return board.share(meeting.results, call)

    def _park(self, meeting: Meeting, waiting: Signature) -> None:
        event = self._events.setdefault(meeting, trio.Event())

        async def wait() -> None:
            with trio.move_on_after(self._limit_s):
                await event.wait()
            if not event.is_set():
                self._board.time_out(meeting, waiting, self._limit_s)
                self._wake_all()

        try:
            park(wait)
        except BaseException as error:
            self.fail(signature.broken(f"{waiting} was given up: {type(error).__name__}"))
            raise

    def _complete(self, meeting: Meeting, last: Signature) -> None:
        try:
            meeting.results = board.combined(meeting)
        except BaseException as error:
            self.fail(signature.broken(f"{last} could not be computed: {error!r}"))
            raise
        event = self._events.pop(meeting, None)
        if event is not None:
            event.set()

    def _wake_all(self) -> None:
        while self._events:
            self._events.popitem()[1].set()

    def fail(self, failure: Failure) -> None:
        self._board.fail(failure)
        self._wake_all()

    def last_call(self, rank: int) -> str:
        return self._board.last_call(rank)


def open_inline_planes(grid: Grid, *, limit_s: float) -> dict[int, LayerEnd]:
    """Ends for ranks whose forwards run by `compute_inline` in one trio run.

    A call that waits longer than `limit_s` seconds of trio's clock raises PlaneTimeout on all.
    """
    return planes_on_boards(grid, [InlineBoard(limit_s) for _ in range(grid.pp)])
