"""Every pair and triple of features is refused by the table, or served with the right text here."""

from itertools import combinations

import pytest

from aserve.core.features import explain
from aserve.testing.world import World
from tests.sim.feature_worlds import SIGNS, Feature, config_of, setup_of


def verdict(on: frozenset[Feature]) -> str:
    """ "served" or "refused"; an AssertionError if it was neither."""
    setup = setup_of(on)
    if explain(config_of(setup)):
        return "refused"
    world = World(1, setup)
    outcome = world.run()
    assert outcome.broken is None, f"{sorted(on)}: {outcome.broken}"
    for feature in sorted(on & SIGNS.keys()):
        assert SIGNS[feature](world, outcome), f"{sorted(on)}: no sign of {feature}"
    return "served"


def walk(size: int, first: int = 0, every: int = 1) -> dict[str, list[frozenset[Feature]]]:
    found: dict[str, list[frozenset[Feature]]] = {"served": [], "refused": []}
    chosen = [frozenset(names) for names in combinations(Feature, size)]
    for on in chosen[first::every]:
        found[verdict(on)].append(on)
    return found


@pytest.mark.slow
def test_each_feature_alone_is_served_or_refused() -> None:
    found = walk(1)
    assert found["refused"] == [frozenset([Feature.DYNAMIC])]
    assert len(found["served"]) == 14


@pytest.mark.slow
def test_every_pair_is_served_or_refused() -> None:
    found = walk(2)
    assert len(found["served"]) + len(found["refused"]) == 105
    # Only dynamic chunks are refused, where there is no second stage to wait for them.
    assert all(Feature.DYNAMIC in on and Feature.PP not in on for on in found["refused"])
    assert len(found["refused"]) == 13


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_triple_is_served_or_refused(part: int) -> None:
    found = walk(3, part, 4)
    assert len(found["served"]) + len(found["refused"]) in (113, 114)
    assert all(Feature.DYNAMIC in on and Feature.PP not in on for on in found["refused"])


@pytest.mark.slow
def test_all_features_together_are_served() -> None:
    assert verdict(frozenset(Feature)) == "served"
