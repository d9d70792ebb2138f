"""What the measurement of drafts counts and says; what it times is the machine's."""

import argparse
import pathlib

import pytest
import trio

from aserve.bench.spec import PLAIN, Run, measure, rows_of, settings_of, table
from aserve.testing.tiny import write_tiny_model


def test_drafts_are_read_as_they_are_written() -> None:
    fixed = settings_of("draft:3,2,6=some/path")
    assert fixed["spec__method"] == "draft"
    assert fixed["spec__path"] == "some/path"
    assert [fixed[f"spec__{name}"] for name in ("depth", "topk", "tokens")] == [3, 2, 6]
    assert fixed["spec__adaptive"] is False
    assert settings_of("eagle3").keys() == settings_of(PLAIN).keys()
    for wrong in ("ngram:3", "ngram:3,1,x", "ngram:1,2,3,4"):
        with pytest.raises(ValueError, match="write METHOD"):
            settings_of(wrong)


def test_ratios_are_of_medians_and_another_text_is_told() -> None:
    def runs(*speeds: float, said: int = 1) -> list[Run]:
        return [Run(speed, 2.0, ((said,),)) for speed in speeds]

    found = rows_of(
        {
            ("own", PLAIN, 1): runs(10, 30, 20),
            ("own", "ngram", 1): runs(90, 40, 50),
            ("own", "draft", 1): [*runs(10, 10), *runs(10, said=2)],
        },
        [1],
    )
    assert [(row.drafts, row.of_plain[1], row.same) for row in found] == [
        (PLAIN, 1.0, True),
        ("ngram", 2.5, True),
        ("draft", 0.5, False),
    ]
    lines = table(found, [1]).splitlines()
    assert lines[3] == "| own | ngram | 2.00 | 50 (2.50x) |"
    assert "other text!" in lines[4]


@pytest.mark.slow
def test_drafts_are_measured_beside_none(tmp_path: pathlib.Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", context_len=2048)
    options = argparse.Namespace(
        model=str(model),
        drafts=["ngram:4,1,4", f"draft:2,2,4={model}"],
        texts=["questions", "own", "repeating"],
        streams=[1, 2],
        answers=2,
        tokens=24,
        rounds=1,
    )
    rows = trio.run(measure, options)
    assert len(rows) == 9
    assert all(row.same for row in rows)
    assert all(speed > 0 for row in rows for speed in row.speeds.values())
    by = {(row.text, row.drafts.partition(":")[0]): row.per_step for row in rows}
    for text in options.texts:
        assert by[text, PLAIN] == 1.0
        assert by[text, "draft"] > 1.5
