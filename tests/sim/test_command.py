"""`aserve sim`: exit codes, what a broken law prints, and that it can be seen again."""

import re

import pytest

from aserve.cli import main
from aserve.testing.faulty import BY_NAME, planted
from aserve.testing.scenarios import SCENARIOS


def test_seeds_that_break_no_law_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seeds", "2", "--scenario", "one-rank"]) == 0
    assert "2 seeds of one-rank" in capsys.readouterr().out


def test_a_broken_law_is_told_with_its_seed_its_plans_and_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["sim", "--seeds", "1", "--first-seed", "2", "--scenario", "trees"]
    with planted(BY_NAME["compaction skipped"]):
        assert main(given) == 1
        told = capsys.readouterr().out
        command = re.search(r"again: aserve (.+)", told)
        assert command is not None
        assert main(command[1].split()) == 1
        again = capsys.readouterr().out
    assert "seed 2 (trees): the law 'text' is broken" in told
    assert 1 <= len(re.findall(r"^ +step \d+/\d ", told, re.MULTILINE)) <= 10
    assert told.split(" in ")[0] == again.split(" in ")[0]


def test_the_scenarios_are_listed_each_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(SCENARIOS)
    assert all(s.name in line and s.why in line for s, line in zip(SCENARIOS, lines, strict=True))


@pytest.mark.parametrize(
    "given", [["--scenario", "nowhere"], ["--seeds", "0"], ["--first-seed", "-1"]]
)
def test_what_cannot_be_is_refused(given: list[str]) -> None:
    assert main(["sim", *given]) == 2
