"""The conformance suite over every layer plane, its ranks threads or greenlets of this process."""

from functools import partial

import pytest

from aserve.testing.collectives import CASES, check_collective
from tests.planes import ranks

TRANSPORTS = {
    "threads": ranks.run_threads,
    "inline": ranks.run_inline,
    "shared memory": ranks.run_shared_memory,
    "gloo": partial(ranks.run_torch, "step"),
    "gloo, every call checked": partial(ranks.run_torch, "call"),
}
# Where more than one transport is slow, or all are over sockets.
SLOW_CASES = {"one absent", "two absent", "large tensors"}


PAIRS = [
    pytest.param(
        transport,
        name,
        marks=[pytest.mark.slow] if "gloo" in transport or name in SLOW_CASES else [],
    )
    for transport in TRANSPORTS
    for name in CASES
]


@pytest.mark.parametrize(("transport", "name"), PAIRS)
def test_every_case_passes_on_every_transport(transport: str, name: str) -> None:
    check_collective(TRANSPORTS[transport], [name])
