"""Every planted fault is caught within a few seeds, and by the law that should catch it."""

from random import Random

import pytest

from aserve.testing.faulty import FAULTS, SEEDS, Fault, planted
from aserve.testing.laws import Broken
from aserve.testing.scenarios import BY_NAME
from aserve.testing.swarm import draw
from aserve.testing.world import World


def first_broken(fault: Fault) -> tuple[int, Broken] | None:
    forced = {**BY_NAME[fault.scenario].forced, **fault.forced}
    for seed in SEEDS:
        broken = World(seed, draw(Random(seed), forced)).run().broken
        if broken is not None:
            return seed, broken
    return None


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_planted_fault_is_caught_by_its_law(fault: Fault) -> None:
    with planted(fault):
        found = first_broken(fault)
    assert found is not None, f"{len(SEEDS)} seeds of {fault.scenario} did not notice"
    assert found[1].law in fault.laws, found[1]


@pytest.mark.slow
def test_without_the_fault_the_same_seeds_break_no_law() -> None:
    for fault in FAULTS[::4]:
        forced = {**BY_NAME[fault.scenario].forced, **fault.forced}
        assert World(0, draw(Random(0), forced)).run().broken is None, fault.name


def test_at_least_twenty_faults_are_planted_and_together_break_most_laws() -> None:
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert len({law for fault in FAULTS for law in fault.laws}) >= 12
