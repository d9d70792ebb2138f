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

_Job = tuple[Callable[[], Any], trio.lowlevel.Task]


class ComputeThread:
    """Call it to run a function on the thread; `cancelled` says that the waiter gave up."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        # A daemon, so that an interpreter which ends with a forgotten engine reaches its atexit
        # hooks; open_compute_thread joins it in every other case.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.cancelled = False

    async def __call__(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """`function(*args)` on the thread. Cancellation is delivered when the job has ended."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._jobs.put((lambda: function(*args), trio.lowlevel.current_task()))

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self.cancelled = True
            return trio.lowlevel.Abort.FAILED

        result: T = await trio.lowlevel.wait_task_rescheduled(abort)
        return result

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, task = job
            result = outcome.capture(function)
            del function, job
            self._token.run_sync_soon(trio.lowlevel.reschedule, task, result)
            del task, result

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
