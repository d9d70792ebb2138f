"""`aserve bench plan` runs, adds up and speaks JSON; its bars are for a quiet machine."""

import json

import pytest

from aserve.bench import plan


def test_it_prints_a_row_a_size_and_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--running", "1", "4", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert [line.split()[0] for line in lines[1:3]] == ["1", "4"]
    assert "Python" in lines[3]


def test_json_has_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--running", "64", "--steps", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    (row,) = result["rows"]
    assert (row["running"], row["steps"], row["bar"]) == (64, 3, 400.0)
    for part in ("planner", "codec", "replica"):
        assert 0 < row[part] <= row["step_p90"]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        plan.main(["--running", "0"])
