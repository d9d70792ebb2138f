"""The feature table: complete, with reasons, and honest about what is not here."""

import pytest

from aserve.core import features
from aserve.core.config import Config, Layout, Schedule, Spec
from aserve.core.features import ABSENT, ASKED, RULES, SET_BY, Feature, explain, matrix, rows
from aserve.core.settings import describe


def test_the_defaults_start() -> None:
    assert explain(Config()) == ()


@pytest.mark.parametrize("axis", ["tp", "pp", "dp", "cp", "ep", "moe_dp"])
@pytest.mark.parametrize("numerics", ["exact", "fast"])
def test_every_axis_starts_alone(axis: str, numerics: str) -> None:
    layout = Layout(**{"tp": 2, axis: 2, "numerics": numerics})
    assert explain(Config(layout=layout, schedule=Schedule(overlap=1))) == ()


@pytest.mark.parametrize("method", ["ngram", "draft", "eagle", "eagle3"])
def test_every_way_of_drafting_starts_under_all_axes(method: str) -> None:
    layout = Layout(tp=8, pp=2, dp=2, cp=2, ep=2, moe_dp=2)
    assert explain(Config(layout=layout, spec=Spec(method))) == ()


def test_all_axes_start_together() -> None:
    layout = Layout(tp=8, pp=2, dp=2, cp=2, ep=2, moe_dp=2, cp_split="zigzag")
    schedule = Schedule(dynamic_chunks=True, overlap=2)
    assert explain(Config(layout=layout, schedule=schedule)) == ()


def test_chunks_of_equal_time_need_stages_that_could_wait() -> None:
    [finding] = explain(Config(schedule=Schedule(dynamic_chunks=True)))
    assert finding.features == (Feature.DYNAMIC_CHUNKS, Feature.PP)
    assert finding.text.startswith("schedule.dynamic_chunks needs layout.pp: ")


def test_all_findings_come_together() -> None:
    config = Config(layout=Layout(tp=4, dp=3, ep=3), schedule=Schedule(dynamic_chunks=True))
    found = [finding.features for finding in explain(config)]
    assert found == [(Feature.DYNAMIC_CHUNKS, Feature.PP), (), ()]


def test_nothing_that_works_refuses_another() -> None:
    """A forbid row is a debt; there is none."""
    assert [rule for rule in RULES if rule.kind == "forbid"] == []


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
    assert any("tensor parallelism | yes | all that works" in line for line in lines)
    assert any("disaggregation | no: no KV plane is built" in line for line in lines)
