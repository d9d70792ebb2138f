"""Configuration is merged by strength, and everything wrong with it is said at once."""

import msgspec
import pytest

from aserve.core.config import Config, Schedule
from aserve.core.settings import KEYS, describe, merge
from aserve.errors import ConfigError


def findings(toml: dict[str, object], **overrides: str) -> tuple[str, ...]:
    dotted = {key.replace("__", "."): text for key, text in overrides.items()}
    with pytest.raises(ConfigError) as caught:
        merge(Config(), toml, dotted)
    return caught.value.findings


def test_overrides_beat_toml_and_toml_beats_defaults() -> None:
    defaults = Config(schedule=Schedule(waiting_max=9))
    toml = {"schedule": {"step_tokens": 64, "running_max": 3}, "server": {"drain_s": 2}}
    config = merge(defaults, toml, {"schedule.running_max": "5"})
    assert config.schedule == Schedule(step_tokens=64, running_max=5, waiting_max=9)
    assert config.server.drain_s == 2.0
    assert merge(defaults, {}) == defaults


def test_override_text_is_read_by_type() -> None:
    config = merge(
        Config(),
        {"cache": {"kv_tokens": 4096}, "server": {"api_key": "old"}},
        {
            "cache.kv_tokens": "none",
            "compute.threads": " 2 ",
            "schedule.prefix_cache": "False",
            "server.drain_s": "1.5",
            "server.api_key": "",
            "model.context_len": "512",
            "model.dtype": "float32",
            "model.path": "None",
        },
    )
    assert config.cache.kv_tokens is None
    assert config.compute.threads == 2
    assert config.schedule.prefix_cache is False
    assert config.server.drain_s == 1.5
    assert config.server.api_key is None
    assert config.model.context_len == 512
    assert config.model.dtype == "float32"
    assert config.model.path == "None"


def test_all_findings_come_together() -> None:
    found = findings(
        {"layot": {"tp": 4}, "cache": {"pagesize": 3, "page_size": "x"}, "server": 3},
        tp="2",
        schedule__prefix_cache="maybe",
        schedule__running_max="0",
        server__log_level="loud",
        server__port="70000",
    )
    assert found == (
        "unknown section [layot]; did you mean [layout]?",
        "[server] must be a table, not 3",
        "unknown key cache.pagesize; did you mean cache.page_size?",
        "cache.page_size must be an integer, not 'x'",
        "unknown key tp; did you mean layout.tp?",
        "schedule.prefix_cache must be true or false, not 'maybe'",
        "server.log_level must be one of debug, info, warning, error, not 'loud'",
        "schedule.running_max is 0, it must be from 1 to 65536",
        "server.port is 70000, it must be from 0 to 65535",
    )


def test_toml_types_are_not_guessed() -> None:
    assert findings({"layout": {"tp": "2"}}) == ("layout.tp must be an integer, not '2'",)
    assert findings({"schedule": {"prefix_cache": 1}}) == (
        "schedule.prefix_cache must be true or false, not 1",
    )
    assert findings({"layout": {"tp": True}}) == ("layout.tp must be an integer, not True",)
    assert findings({"model": {"name": 3}}) == ("model.name must be text or none, not 3",)


def test_a_key_like_no_other_gets_no_suggestion() -> None:
    assert findings({"zzz": {}})[0].startswith("unknown section [zzz]; there are model, layout")
    assert findings({"cache": {"qqqqqqqq": 1}}) == ("unknown key cache.qqqqqqqq",)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9"])
def test_odd_numbers_are_out_of_range(text: str) -> None:
    assert "server.drain_s" in findings({}, server__drain_s=text)[0]


def test_a_step_and_a_pool_must_hold_a_page() -> None:
    found = findings({"cache": {"page_size": 32, "kv_tokens": 8}, "schedule": {"step_tokens": 31}})
    assert len(found) == 2
    assert "at least cache.page_size = 32" in found[0]
    assert "must hold a page of 32" in found[1]


def test_each_attention_group_has_rows_for_a_page_in_a_step() -> None:
    sizes = {"cache": {"page_size": 128}, "schedule": {"step_tokens": 512}}
    merge(Config(), {**sizes, "layout": {"dp": 4, "tp": 4}})
    (found,) = findings({**sizes, "layout": {"dp": 8, "tp": 8}})
    assert "schedule.step_tokens is 512" in found
    assert "at least cache.page_size = 128 for each of layout.dp = 8 groups" in found


def test_a_pool_of_no_size_is_told_its_range_and_no_page_of_0() -> None:
    found = findings({"cache": {"page_size": 0, "kv_tokens": -5}})
    assert len(found) == 2
    assert "cache.kv_tokens is -5, it must be from 1" in found[1]


def test_every_key_has_a_row_and_every_row_a_key() -> None:
    keys = [
        f"{section}.{field.name}"
        for section in Config.__struct_fields__
        for field in msgspec.structs.fields(type(getattr(Config(), section)))
    ]
    assert [setting.key for setting in describe()] == keys
    assert sorted(KEYS) == sorted(keys)
    for setting in describe():
        assert setting.help


def test_every_number_has_a_range_that_holds_its_default() -> None:
    for setting in describe():
        if not setting.choices and ("int" in setting.type or "float" in setting.type):
            least, most, _ = KEYS[setting.key]
            assert least is not None, setting.key
            assert most is not None, setting.key
            assert setting.default is None or least <= setting.default <= most, setting.key


def test_describe_tells_choices_and_types() -> None:
    by_key = {setting.key: setting for setting in describe()}
    assert by_key["compute.kernels"].choices == ("native", "reference")
    assert by_key["cache.kv_tokens"].type == "int | none"
    assert by_key["schedule.step_tokens"].default == Config().schedule.step_tokens


@pytest.mark.parametrize(
    ("set_", "words"),
    [
        ({"spec.depth": "3", "spec.path": "head"}, "spec.path, spec.depth without spec.method"),
        ({"spec.method": "ngram", "spec.path": "head"}, "n-gram drafts need no weights"),
        ({"spec.method": "mtp"}, "spec.method must be one of none, ngram, draft, eagle, eagle3"),
    ],
)
def test_what_would_draft_nothing_is_a_finding(set_: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        merge(Config(), {}, set_)
    (found,) = caught.value.findings
    assert words in found
