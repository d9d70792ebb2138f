"""The threads behind native operations: they are awake within a step, and cost nothing after it."""

import threading
import time

import pytest
import torch

from aserve.tensor.native import NativeOps
from tests.tensor.block_cases import SIZES, Case


def spent_elsewhere(own_s: float) -> float:
    """CPU seconds of the other threads of this process while this one computes for `own_s`."""
    own, everyone = time.thread_time(), time.process_time()
    while time.thread_time() - own < own_s:
        pass
    return time.process_time() - everyone - (time.thread_time() - own)


def test_workers_sleep_soon_after_a_block_has_ended() -> None:
    case = Case(NativeOps(3), SIZES[4])
    x = torch.randn(40, 192)
    case.mlp.whole(x, x)
    assert spent_elsewhere(0.04) < 0.02, "two workers would have spun for 0.08"


def test_a_block_that_fails_lets_the_workers_sleep() -> None:
    ops = NativeOps(3)

    def fail(index: int) -> None:
        raise LookupError(index)

    with pytest.raises(RuntimeError, match="LookupError"):
        ops.team.run(64, fail)
    assert spent_elsewhere(0.04) < 0.02


def test_blocks_of_several_callers_on_one_team_all_end() -> None:
    case = Case(NativeOps(4), SIZES[1])
    x = torch.randn(30, 64)
    wanted, wrong = case.mlp.gated(x), []

    def repeat() -> None:
        for _ in range(50):
            if not torch.equal(case.mlp.gated(x), wanted) or len(case.mlp.whole(x, x)[1]) != 30:
                wrong.append(1)

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
