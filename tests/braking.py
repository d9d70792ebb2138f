"""Steps that wait for leave, so that no test depends on how far a model comes meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aserve.runner.runner import Runner

LIMIT_S = 60.0


class Brake:
    """Counts the steps that ranks of this process may still begin; `release` ends the counting."""

    def __init__(self, n_steps: int) -> None:
        self._leave = threading.Semaphore(n_steps)
        self._released = threading.Event()

    def wait(self) -> None:
        """On a compute thread."""
        if not self._released.is_set():
            assert self._leave.acquire(timeout=LIMIT_S), "nobody released the brake"

    def release(self) -> None:
        self._released.set()
        self._leave.release(1 << 10)  # whoever waits already


@contextmanager
def braked(n_steps: int) -> Iterator[Brake]:
    """After `n_steps` more steps every rank stands before the next one until released, at the
    latest when the block is left.
    """
    brake = Brake(n_steps)
    forward = Runner.forward

    def braking(self: Runner, work: Any, inward: Any) -> Any:
        brake.wait()
        return forward(self, work, inward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "forward", braking)
        try:
            yield brake
        finally:
            brake.release()
