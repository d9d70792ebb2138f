"""What this machine can do at most, measured in the run that uses it: bytes read, products made.

Reads are measured at the span a case goes through, since caches keep small spans; the rate of
products is the best of tiles that never leave the registers and of large square products.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from aserve import _native
from aserve.tensor.native import NativeOps

BURST_S = 0.002  # one timing covers at least this much work
PROBE_SIDE = 2048
PROBE_ROWS = 512
TILE_ROUNDS = 20_000
SPAN_MIN, SPAN_MAX = 1 << 20, 256 << 20
LINE_BYTES = 64
SLOW_S = 0.02  # of a call: two bursts of such show what it takes
CEILING_ROUNDS = 4  # bursts of a ceiling, for one of a kernel


def burst(call: Callable[[], object]) -> float:
    """Seconds a call, over as many calls as fill a burst."""
    calls, spent = 1, 0.0
    while spent < BURST_S:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - begin
        if spent < BURST_S:
            calls = max(calls + 1, int(calls * min(20, 1.2 * BURST_S / max(spent, 1e-7))))
    return spent / calls


def best(calls: Sequence[Callable[[], object]], rounds: int, slow_s: float = SLOW_S) -> list[float]:
    """Each call's best burst, the calls taking turns: what disturbs one disturbs all."""
    found = [float("inf")] * len(calls)
    for call in calls:
        call()
    for number in range(rounds):
        for index, call in enumerate(calls):
            if number < 2 or found[index] < slow_s:
                found[index] = min(found[index], burst(call))
    return found


class Ceilings:
    """Bytes a second by span, and bfloat16 operations a second."""

    def __init__(self, ops: NativeOps, rounds: int) -> None:
        # A ceiling taken in a disturbed moment would flatter every row under it.
        self._team, self._rounds = ops.team, CEILING_ROUNDS * rounds
        self._bandwidth: dict[int, float] = {}
        # numpy and torch align to 64 bytes or less: a line more lets the reads begin on one.
        self._memory = torch.ones(SPAN_MAX + LINE_BYTES, dtype=torch.uint8)
        self.rate = max(self._tiles(), self._square(ops))

    def bandwidth(self, span: float) -> float:
        """Of reads that go through so many bytes again and again: the next power of two."""
        size = SPAN_MIN
        while size < min(span, SPAN_MAX):
            size *= 2
        size = min(size, SPAN_MAX)
        if size not in self._bandwidth:
            self._bandwidth[size] = self._read(size)
        return self._bandwidth[size]

    def told(self) -> dict[str, object]:
        """What was measured, for the record."""
        spans = {f"{size >> 20} MiB": rate for size, rate in sorted(self._bandwidth.items())}
        return {"bandwidth": spans, "rate": self.rate}

    def _read(self, size: int) -> float:
        address = -(-self._memory.data_ptr() // LINE_BYTES) * LINE_BYTES
        ours = lambda: _native.probe_read(self._team, address, size)  # noqa: E731
        theirs = self._memory[:size].view(torch.float32).sum
        return size / min(best([ours, theirs], self._rounds, math.inf))

    def _tiles(self) -> float:
        """0 where there are no tiles."""
        operations = _native.probe_products(self._team, 1)
        if not operations:
            return 0.0
        call = lambda: _native.probe_products(self._team, TILE_ROUNDS)  # noqa: E731
        (seconds,) = best([call], self._rounds, math.inf)
        return float(operations * TILE_ROUNDS / seconds)

    def _square(self, ops: NativeOps) -> float:
        weight = torch.randn(PROBE_SIDE, PROBE_SIDE).bfloat16()
        packed, x = ops.pack(weight), torch.randn(PROBE_ROWS, PROBE_SIDE)
        x_bf16 = x.bfloat16()
        ours = lambda: ops.linear(x, packed)  # noqa: E731
        theirs = lambda: torch.nn.functional.linear(x_bf16, weight)  # noqa: E731
        operations = 2 * PROBE_ROWS * PROBE_SIDE * PROBE_SIDE
        return operations / min(best([ours, theirs], self._rounds, math.inf))
