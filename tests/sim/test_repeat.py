"""A seed is a run: the same plans, reports and times again, also in another process."""

import os
import subprocess
import sys

import pytest

from aserve.testing.scenarios import run_seed

# Several ranks, stages and groups, drafts, aborts, and links and ranks that break.
SCENARIO, SEED = "crashes-with-trees", 0
PROGRAM = f"""
from aserve.testing.scenarios import run_seed
print(run_seed({SCENARIO!r}, {SEED}).hash)
"""


@pytest.mark.parametrize(
    ("scenario", "seed"), [("swarm", 18), pytest.param(SCENARIO, SEED, marks=pytest.mark.slow)]
)
def test_a_seed_runs_the_same_way_twice_and_another_does_not(scenario: str, seed: int) -> None:
    first = run_seed(scenario, seed)
    other = run_seed(scenario, seed + 1)
    again = run_seed(scenario, seed)
    assert first.hash == again.hash
    assert first.plans == again.plans
    assert first.virtual_s == again.virtual_s
    assert first.hash != other.hash
    assert first.restarts > 0


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_a_seed_runs_the_same_way_in_a_fresh_process(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == run_seed(SCENARIO, SEED).hash
