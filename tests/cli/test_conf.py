"""The files of conf/: each is accepted, each server among them starts as it is."""

import json
import os
import pathlib
import subprocess
import urllib.request
from typing import Any

import pytest
import yaml

from aserve.actors.rendezvous import berth
from aserve.cli.flags import CommandParser, add_model_flags, config_of, read_toml
from aserve.core.config import Config
from aserve.core.layout import Grid
from tests.cli.test_serve import serving

CONF = pathlib.Path(__file__).resolve().parents[2] / "conf"
TOMLS = sorted(path.name for path in CONF.glob("*.toml"))


def accepted(*flags: str) -> Config:
    parser = CommandParser("serve", "")
    add_model_flags(parser, {})
    return config_of(parser.parse_args(flags))


@pytest.mark.parametrize("name", TOMLS)
def test_each_configuration_is_accepted(name: str) -> None:
    assert accepted("--config", str(CONF / name)) != Config()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOMLS)
def test_each_server_starts_as_it_is_and_answers(name: str, smollm2_path: pathlib.Path) -> None:
    table = read_toml(str(CONF / name))
    model = table["model"].get("name", "smollm2")
    with serving("--config", str(CONF / name)) as (url, line, _):
        assert f"serving {model} at" in line
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"][0]["text"].strip()


def test_the_slurm_script_is_a_script() -> None:
    script = CONF / "slurm.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "--config conf/torchrun.toml --ranks cluster" in script.read_text(encoding="utf-8")
    accepted("--config", str(CONF / "torchrun.toml"), "--ranks", "cluster")


@pytest.fixture(scope="module")
def manifest() -> dict[str, dict[str, Any]]:
    """Objects of conf/kubernetes.yaml by kind and name."""
    text = (CONF / "kubernetes.yaml").read_text(encoding="utf-8")
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in yaml.safe_load_all(text)}


def test_the_pods_of_the_manifest_are_the_world_of_its_configuration(
    manifest: dict[str, dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "aserve.toml"
    path.write_text(manifest["ConfigMap/aserve"]["data"]["aserve.toml"], encoding="utf-8")
    config = accepted("--config", str(path))
    pods = manifest["StatefulSet/aserve"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    variables = {one["name"]: one.get("value", "x" * 32) for one in container["env"]}
    for ordinal in range(pods["replicas"]):
        found = berth({**variables, "HOSTNAME": f"aserve-{ordinal}"})
        assert (found.rank, found.world) == (ordinal, Grid(config.layout).world)
        assert found.host == "aserve-0.aserve-ranks"
        assert manifest["Service/aserve-ranks"]["spec"]["ports"][0]["port"] == found.port
    assert config.ranks.live == "cluster"
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports["http"] == config.server.port
    grace_s = pods["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.server.drain_s + 5


def test_the_probes_of_the_manifest_ask_rank_0_alone(
    manifest: dict[str, dict[str, Any]], tmp_path: pathlib.Path
) -> None:
    [container] = manifest["StatefulSet/aserve"]["spec"]["template"]["spec"]["containers"]
    asked = tmp_path / "asked"
    fake = tmp_path / "python3"
    fake.write_text(f'#!/bin/sh\necho "$2" >> {asked}\n', encoding="utf-8")
    fake.chmod(0o755)
    for probe, route in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
        for ordinal in (1, 0):
            environment = {**os.environ, "HOSTNAME": f"aserve-{ordinal}"}
            environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
            subprocess.run(container[probe]["exec"]["command"], env=environment, check=True)
            assert asked.exists() == (ordinal == 0)
        assert f"127.0.0.1:8000{route}'" in asked.read_text(encoding="utf-8")
        asked.unlink()
