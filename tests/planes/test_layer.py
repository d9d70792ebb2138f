"""The conformance suite over the planes of one process, and what only these can do."""

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


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_case_passes_in_one_process(transport: str, name: str) -> None:
    check_collective(TRANSPORTS[transport], [name])
