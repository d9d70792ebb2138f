"""The feature table: complete, with reasons, and honest about what is not here."""

import pytest

from aserve.core import features
from aserve.core.config import Config, Layout
from aserve.core.features import ABSENT, ASKED, RULES, SET_BY, Feature, explain, matrix, rows
from aserve.core.settings import describe


def test_the_defaults_start() -> None:
    assert explain(Config()) == ()


@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp", "ep", "moe_dp"])
def test_more_than_one_rank_is_refused_with_the_key_and_a_reason(axis: str) -> None:
    layout = Layout(**{"tp": 2, axis: 2})
    found = [str(finding) for finding in explain(Config(layout=layout))]
    assert any(text.startswith(f"layout.{axis}: ") and "one rank" in text for text in found)


def test_all_findings_come_together() -> None:
    found = explain(Config(layout=Layout(tp=4, pp=2, dp=3)))
    assert [finding.features for finding in found] == [
        (Feature.TP,),
        (Feature.PP,),
        (Feature.DP,),
        (),
    ]


def test_every_feature_has_a_row() -> None:
    assert list(SET_BY) == list(Feature)
    assert [row.feature for row in rows()] == list(Feature)
    for row in rows():
        assert row.works == (Feature(row.feature) not in ABSENT)
        assert row.works or row.why


def test_every_key_that_sets_a_feature_exists() -> None:
    keys = {setting.key for setting in describe()}
    for feature in ASKED:
        assert SET_BY[feature] in keys, feature


def test_every_rule_has_a_reason_and_known_kind() -> None:
    for rule in RULES:
        assert rule.why
        assert rule.kind in ("forbid", "require", "imply")
        assert rule.first != rule.second


def test_forbid_and_require_rows_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    made = (
        features.forbid(Feature.FLOAT32, Feature.PREFIX_CACHE, why="just so"),
        features.require(Feature.FLOAT32, Feature.TP, why="it must"),
        features.require(Feature.FLOAT32, Feature.ABORT, why="always there"),
    )
    monkeypatch.setattr(features, "RULES", made)
    assert explain(Config()) == ()
    config = Config(model=type(Config().model)(dtype="float32"))
    assert [finding.text for finding in explain(config)] == [
        "model.dtype and schedule.prefix_cache: just so",
        "model.dtype needs layout.tp: it must",
    ]
    by_name = {row.feature: row for row in rows()}
    assert by_name[Feature.FLOAT32].refused_with == {Feature.PREFIX_CACHE: "just so"}
    assert by_name[Feature.PREFIX_CACHE].refused_with == {Feature.FLOAT32: "just so"}
    assert "not with prefix cache: just so" in matrix()


def test_the_matrix_has_a_line_for_each_feature() -> None:
    lines = matrix().splitlines()
    assert len(lines) == len(Feature) + 2
    assert all(line.count(" | ") == lines[0].count(" | ") for line in lines[2:])
    assert any("tensor parallelism | no: this release runs one rank" in line for line in lines)
