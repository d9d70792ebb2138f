"""`aserve sim`: whole deployments in virtual time, one a seed; exit 1 where a law is broken."""

import sys
import time
from collections.abc import Sequence

from aserve.cli.flags import CommandParser
from aserve.cli.outcome import FAILED, UsageError
from aserve.testing.scenarios import BY_NAME, SCENARIOS, run_seed, setup_of
from aserve.testing.story import told

SHOWN_EVERY_S = 2.0


def run(given: Sequence[str]) -> int:
    parser = CommandParser(
        "sim",
        "Run simulated deployments of the real planner, leader, ranks and planes, with troubles.",
        usage="[--seeds N] [--first-seed S] [--scenario NAME] [--list]",
    )
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many (100)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="the first (0)")
    parser.add_argument("--scenario", default="swarm", metavar="NAME", help="see --list (swarm)")
    parser.add_argument("--list", action="store_true", help="the scenarios, with why each is one")
    arguments = parser.parse_args(given)
    if arguments.list:
        for scenario in SCENARIOS:
            sys.stdout.write(f"{scenario.name:24} {scenario.why}\n")
        return 0
    if arguments.scenario not in BY_NAME:
        raise UsageError(f"there is no scenario {arguments.scenario!r}; see `aserve sim --list`")
    if arguments.seeds < 1 or arguments.first_seed < 0:
        raise UsageError("--seeds is at least 1, --first-seed at least 0")
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    return simulate(arguments.scenario, seeds)


def simulate(scenario: str, seeds: range) -> int:
    """Every seed, whatever became of those before; the exit code."""
    broken: list[int] = []
    started = shown = time.monotonic()
    for done, seed in enumerate(seeds):
        now = time.monotonic()
        if now - shown > SHOWN_EVERY_S:
            shown = now
            sys.stderr.write(f"aserve: {done} of {len(seeds)} seeds, {len(broken)} broken\n")
            sys.stderr.flush()
        outcome = run_seed(scenario, seed)
        if outcome.broken is not None:
            broken.append(seed)
            sys.stdout.write(told(seed, scenario, setup_of(scenario, seed), outcome))
            sys.stdout.flush()
    spent_s = time.monotonic() - started
    verdict = f"{len(broken)} broke a law: {broken}" if broken else "every law held"
    sys.stdout.write(f"{len(seeds)} seeds of {scenario} in {spent_s:.1f} s: {verdict}\n")
    return FAILED if broken else 0
