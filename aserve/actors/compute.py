"""One dedicated worker thread for tensor work, so that its caches and thread teams stay warm.

Jobs run one at a time, in order. A job cannot be cancelled, so whoever waits for it waits it out.
"""

import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple

import outcome
import trio

# The twin for ranks that share a thread, and for simulation under a mock clock.
from aserve.planes.inline import compute_inline as compute_inline

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

SWITCH_S = 0.0005


class ShortSwitches:
    """The interpreter changes threads sooner while anybody is inside: the setting is the process's.

    Between two kernels a compute thread needs the interpreter for microseconds, and would wait for
    it as long as another thread computes in Python: 5 ms, which is many kernels.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, SWITCH_S))
            self._inside += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                sys.setswitchinterval(self._before_s)


SHORT_SWITCHES = ShortSwitches()


class Job:
    """A function on its way through the thread. Whoever posts it waits for it, or abandons it."""

    def __init__(self, thread: "ComputeThread", run: Callable[[], Any]) -> None:
        self._thread = thread
        self._run: Callable[[], Any] | None = run
        self._waiter: trio.lowlevel.Task | None = None
        self._result: outcome.Outcome[Any] | None = None

    async def wait(self, on_cancel: Callable[[], None] | None = None) -> Any:
        """The function's result. Cancellation is told to `on_cancel`, and delivered when it has
        ended.
        """

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._thread.cancelled = True
            if on_cancel is not None:
                on_cancel()
            return trio.lowlevel.Abort.FAILED

        return await self._ended(abort)

    async def abandon(self) -> None:
        """Nobody wants the result any more: if it has not begun it never will, else wait it out."""
        self._run = None
        await outcome.acapture(self._ended, lambda _raise_cancel: trio.lowlevel.Abort.FAILED)

    async def _ended(self, abort: Callable[[Any], trio.lowlevel.Abort]) -> Any:
        if self._result is None:
            self._waiter = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(abort)
        assert self._result is not None
        return self._result.unwrap()

    def run(self) -> None:
        """On the thread."""
        run, self._run = self._run, None
        if run is None:
            self._result = outcome.Value(None)
            return
        self._result = outcome.capture(run)

    def tell(self) -> None:
        """On the event loop, when it has run."""
        if self._waiter is not None:
            trio.lowlevel.reschedule(self._waiter)


class ComputeThread:
    """Call it to run a function on the thread; `cancelled` says that the waiter gave up."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        # A daemon, so that an interpreter which ends with a forgotten engine reaches its atexit
        # hooks; open_compute_thread joins it in every other case.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.cancelled = False

    def post(self, function: Callable[..., Any], *args: Any) -> Job:
        """`function(*args)` on the thread, right behind what was posted before."""
        job = Job(self, lambda: function(*args))
        self._jobs.put(job)
        return job

    async def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """`function(*args)` on the thread. Cancellation is delivered when the job has ended."""
        await trio.lowlevel.checkpoint_if_cancelled()
        result: T = await self.post(function, *args).wait()
        return result

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            self._token.run_sync_soon(job.tell)
            del job

    def join(self) -> None:
        """The thread is idle (every caller has waited for its job), so this returns at once."""
        self._jobs.put(None)
        self._thread.join()


@asynccontextmanager
async def open_compute_thread(name: str = "aserve-compute") -> AsyncIterator[ComputeThread]:
    thread = ComputeThread(name)
    try:
        with SHORT_SWITCHES:
            yield thread
    finally:
        thread.join()
