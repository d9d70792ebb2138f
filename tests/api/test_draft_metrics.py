"""What a server tells of speculative decoding: `/metrics`, usage, the doctor."""

import pathlib
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from aserve import cli
from aserve.actors.metrics import Meters
from aserve.api.metrics import drafts_told
from aserve.core.acceptance import DraftStatistics
from aserve.core.message import Batch, Drafting, Rows, StepPlan
from aserve.core.status import PlannerStatistics
from tests.api.serving import config_of, running

CHUNK, DRAWN = (Batch((Rows(0, 0, (5,), (), sample, ()),)) for sample in (False, True))
PLAN = StepPlan(0, 0, (), (), (), (), (DRAWN,), (), Drafting(3, 2, 6))


def told(drafts: DraftStatistics, meters: Meters) -> dict[tuple[str, str], float]:
    """Sample values by name and the value of their label, through Prometheus's own text."""
    fields = {name: 0 for name in PlannerStatistics.__struct_fields__ if name != "chunks_warning"}
    planner = PlannerStatistics(**(fields | {"drafts": drafts}))  # type: ignore[arg-type]
    statistics = meters.statistics(planner, ready=True, state="", failure=None, restarts=0)

    class Some(Collector):
        def collect(self) -> Any:
            return drafts_told(statistics)

    registry = CollectorRegistry()
    registry.register(Some())
    text = generate_latest(registry).decode()
    families = text_string_to_metric_families(text)
    return {
        (sample.name.removeprefix("aserve_"), "".join(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }


def test_drafts_are_counted_by_position_and_by_accepted_length() -> None:
    meters = Meters(1)
    meters.plan(PLAN)
    values = told(DraftStatistics(9, 40, 9, (4, 2, 2, 1), 12), meters)
    assert values["target_steps_total", ""] == 12
    assert values["spec_drafts_total", ""] == 9
    assert values["spec_draft_tokens_total", ""] == 40
    assert values["spec_accepted_tokens_total", ""] == 9
    at = [values["spec_accepted_tokens_per_position_total", str(n)] for n in range(3)]
    assert at == [5, 3, 1]
    buckets = [values["spec_accepted_length_bucket", le] for le in ("0.0", "1.0", "2.0", "3.0")]
    assert buckets == [4, 6, 8, 9]
    assert values["spec_accepted_length_bucket", "+Inf"] == 9
    assert values["spec_accepted_length_sum", ""] == 9
    assert (values["spec_depth", ""], values["spec_tokens", ""]) == (3, 6)


def test_without_drafts_all_is_zero_but_the_steps() -> None:
    values = told(DraftStatistics(target_steps=5), Meters(1))
    assert values.pop(("target_steps_total", "")) == 5
    assert set(values.values()) == {0}


def test_statistics_say_what_the_last_plan_asks_for() -> None:
    meters = Meters(1)
    meters.plan(PLAN)
    meters.plan(msgspec.structs.replace(PLAN, drafting=Drafting(), batches=(CHUNK,)))
    assert meters.drafting == PLAN.drafting, "a chunk of a prompt has no draft"
    meters.plan(msgspec.structs.replace(PLAN, drafting=Drafting()))
    assert meters.drafting == Drafting()


def test_a_server_that_drafts_says_how_much_that_saves(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"method": "ngram", "adaptive": False, "depth": 4}
    body = {
        "prompt": "Once upon a time",
        "max_tokens": 60,
        "temperature": 0,
        "structured_outputs": {"regex": "(she said that ){20}"},
    }
    with running(config_of(tiny_model_path, spec=spec)) as server, server.client() as client:
        usage = client.post("/v1/completions", json=body).json()["usage"]
        assert usage["completion_tokens"] == 60
        assert usage["target_steps"] < 30
        lines = client.get("/metrics").text.splitlines()
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("aserve_spec_"))
        drafts = float(values["aserve_spec_drafts_total"])
        assert 0 < drafts < usage["target_steps"]
        # Each step gives its own token and those accepted; the last may be cut at the end.
        accepted = float(values["aserve_spec_accepted_tokens_total"])
        assert accepted >= 60 - usage["target_steps"]
        assert float(values['aserve_spec_accepted_tokens_per_position_total{position="3"}']) > 0
        assert float(values['aserve_spec_accepted_length_bucket{le="+Inf"}']) == drafts
        assert (values["aserve_spec_depth"], values["aserve_spec_tokens"]) == ("4.0", "4.0")
        assert cli.main(["doctor", server.url]) == 0
    assert "drafts by ngram, now 4 tokens in 4 levels; " in capsys.readouterr().out
