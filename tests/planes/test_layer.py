"""The conformance suite over the planes of one process, and what only these can do."""

import pytest

from aserve.testing.collectives import CASES, check_collective
from tests.planes import ranks

ONE_PROCESS = {
    "threads": ranks.run_threads,
    "inline": ranks.run_inline,
    "shared memory": ranks.run_shared_memory,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transport", ONE_PROCESS)
def test_every_case_passes_in_one_process(transport: str, name: str) -> None:
    check_collective(ONE_PROCESS[transport], [name])
