"""Seeds by the hundred: no law is broken, and the seeds do meet what they are there for."""

from collections import Counter
from itertools import pairwise

import pytest

from aserve.testing.scenarios import SCENARIOS, Scenario, run_seed, setup_of
from aserve.testing.story import told
from aserve.testing.world import Outcome, World

QUICK_SEEDS = (1, 4, 5, 7, 8, 10, 12, 15, 18, 24, 25, 34)  # each runs for about a tenth of a second
SEEDS = range(1000, 1200)
SCENARIO_SEEDS = range(3)


def lawful(scenario: str, seed: int) -> Outcome:
    outcome = run_seed(scenario, seed)
    if outcome.broken is not None:
        pytest.fail(told(seed, scenario, setup_of(scenario, seed), outcome), pytrace=False)
    return outcome


@pytest.mark.parametrize("seed", QUICK_SEEDS)
def test_a_seed_breaks_no_law(seed: int) -> None:
    lawful("swarm", seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, 50))
def test_fifty_seeds_break_no_law_and_meet_every_kind_of_trouble(first: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(first, first + 50):
        outcome = lawful("swarm", seed)
        setup = setup_of("swarm", seed)
        met["restarts"] += outcome.restarts
        met["tokens from the cache"] += outcome.hit_tokens
        met["drafted tokens kept"] += outcome.accepted
        met["retractions"] += outcome.retractions
        met["groups"] += setup.layout.dp > 1
        met["stages"] += setup.layout.pp > 1
        met["split prompts"] += setup.layout.cp > 1
        met["experts"] += setup.layout.ep > 1
        met["copies of experts"] += setup.layout.moe_dp > 1
        met["overlap"] += setup.schedule.overlap > 0
    missing = [what for what, count in met.items() if not count]
    assert not missing, f"fifty seeds met no {missing}"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_named_scenario_breaks_no_law(scenario: Scenario) -> None:
    for seed in SCENARIO_SEEDS:
        lawful(scenario.name, seed)


@pytest.mark.slow
def test_named_scenarios_do_what_their_names_say() -> None:
    def total(scenario: str, what: str) -> int:
        return sum(int(getattr(lawful(scenario, seed), what)) for seed in range(4))

    assert total("tight-pool", "retractions") > 1
    assert total("trees", "accepted") > 20
    assert total("shared-prefixes", "hit_tokens") > 100
    assert total("full-queue", "refused") > 0
    assert total("crashes", "restarts") > 4
    assert total("cut-links", "restarts") > 1


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["drafts-of-any-size", "drafts-of-any-size-in-a-pipeline"])
def test_drafts_are_turned_off_and_on_again_and_rows_lag_between(scenario: str) -> None:
    world = World(1, setup_of(scenario, 1))
    assert world.run().broken is None
    sizes = [plan.drafting.tokens for plan in world.laws.plans]
    assert 0 in sizes
    assert len(set(sizes)) > 3
    switched = [(before > 0) != (after > 0) for before, after in pairwise(sizes)]
    assert sum(switched) > 10
    rows = [rows for plan in world.laws.plans for batch in plan.batches for rows in batch.rows]
    assert any(one.parents for one in rows)
    assert any(one.is_lagging for one in rows) == (world.setup.layout.pp == 1)


def test_every_scenario_has_its_own_name_and_a_reason() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all(len(scenario.why) > 20 for scenario in SCENARIOS)
