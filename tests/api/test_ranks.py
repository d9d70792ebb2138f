"""A server whose ranks die: what /ready, /health, /metrics, /debug/state and the doctor say."""

import json
import os
import pathlib
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from aserve import cli
from aserve.cli import doctor
from tests.api.serving import LIMIT_S, Running, config_of, running

COMPLETE = "/v1/completions"
ASK = {"prompt": "Once upon a time", "max_tokens": 200, "seed": 3, "ignore_eos": True}


def test_debug_state_tells_ranks_steps_and_pages(server: Running) -> None:
    with server.client() as client:
        client.post(COMPLETE, json={**ASK, "max_tokens": 3})
        state = client.get("/debug/state").json()
    assert state["state"] == "serving"
    assert (state["restarts"], state["failure"], state["last_break"]) == (0, None, None)
    [rank] = state["ranks"]
    assert rank["answered"]
    assert rank["reported_step"] == rank["step"] == state["planner"]["step"] - 1
    assert state["steps"] == state["silent"] == []
    assert state["planner"]["pages"][0]["owned"] == 0
    assert state["spec"] == {"method": "none", "depth": 0, "topk": 0, "tokens": 0}
    assert state["planner"]["drafts"]["target_steps"] >= 3


def test_the_doctor_tells_what_becomes_of_drafts(server: Running) -> None:
    with server.client() as client:
        state = client.get("/debug/state").json()
    assert not any(line.startswith("drafts by") for line in doctor.report(state))
    state["spec"] = {"method": "ngram", "depth": 4, "topk": 1, "tokens": 4}
    state["planner"]["drafts"] |= {"drafts": 8, "accepted": 20}
    told = "drafts by ngram, now 4 tokens in 4 levels; 8 so far, of which 2.50 tokens each were "
    assert told + "accepted" in list(doctor.report(state))
    state["spec"] |= {"depth": 0, "tokens": 0}
    assert any("ngram, now none; 8 so far" in line for line in doctor.report(state))


def test_the_doctor_prints_it(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", server.url]) == 0
    out = capsys.readouterr().out
    assert out.startswith("serving; 1 ranks (thread), ")
    assert "the only one" in out
    assert "no step is in flight" in out
    assert "\nplanner:\n" in out
    assert cli.main(["doctor", server.url, "--json"]) == 0
    assert '"ranks"' in capsys.readouterr().out


def test_the_doctor_needs_a_server_and_its_key(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(config_of(tiny_model_path, server={"api_key": "secret"})) as server:
        assert cli.main(["doctor", server.url]) == 1
        assert "401: A valid API key is needed" in capsys.readouterr().err
        assert cli.main(["doctor", server.url, "--api-key", "secret"]) == 0
        with server.client() as client:
            assert client.get("/debug/state").status_code == 401
    assert cli.main(["doctor", server.url]) == 1
    assert "did not say" in capsys.readouterr().err
    assert cli.main(["doctor", "ftp://x"]) == 1
    assert "http://" in capsys.readouterr().err


def metric(client: httpx.Client, line: str) -> float:
    found = [text for text in client.get("/metrics").text.splitlines() if text.startswith(line)]
    assert len(found) == 1, line
    return float(found[0].rsplit(" ", 1)[1])


def wait_until(client: httpx.Client, path: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + LIMIT_S
    while (answer := client.get(path)).status_code != status:
        assert time.monotonic() < deadline, answer.text
    return answer


@pytest.mark.slow
def test_a_killed_rank_is_a_pause_that_the_probes_tell_of(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {"layout": {"tp": 2}, "ranks": {"live": "process"}}
    with running(config_of(tiny_model_path, **sections)) as server, server.client() as client:
        right = client.post(COMPLETE, json=ASK).json()["choices"][0]["text"]
        assert metric(client, "aserve_rank_restarts_total") == 0
        assert metric(client, 'aserve_state{state="serving"}') == 1
        engine: Any = server.server.service.engine
        with client.stream("POST", COMPLETE, json={**ASK, "stream": True}) as stream:
            events = (line for line in stream.iter_lines() if line.startswith("data: {"))
            said = [json.loads(next(events)[6:])]
            os.kill(engine._supervisor._placement.children[1].pid, signal.SIGKILL)
            with server.client() as prober:
                told = wait_until(prober, "/ready", 503)
                assert told.json()["status"] == "restarting"
                assert "rank 1 died" in told.json()["reason"]
                assert told.headers["retry-after"] == "1"
                assert prober.get("/health").json() == {"status": "alive"}
                assert cli.main(["doctor", server.url]) == 1
                out = capsys.readouterr().out
                assert out.startswith("restarting; 2 ranks (process), tp 2")
                assert "did not answer: ranks 0, 1" in out
                assert metric(prober, 'aserve_state{state="restarting"}') == 1
                wait_until(prober, "/ready", 200)
                assert metric(prober, "aserve_rank_restarts_total") == 1
            said += [json.loads(line[6:]) for line in events]
        assert "".join(event["choices"][0]["text"] for event in said) == right
        assert said[-1]["choices"][0]["finish_reason"] == "length"
        assert metric(client, 'aserve_rank_step{rank="1"}') >= 0


@pytest.mark.slow
def test_the_doctor_names_who_hangs(
    tiny_model_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections: dict[str, Any] = {"layout": {"pp": 2}, "ranks": {"live": "process"}}
    with running(config_of(tiny_model_path, **sections)) as server, server.client() as client:
        engine: Any = server.server.service.engine
        pid = engine._supervisor._placement.children[1].pid
        with ThreadPoolExecutor(1) as pool:
            # Stopped first: a quick machine would be through with all tokens before the signal.
            os.kill(pid, signal.SIGSTOP)
            try:
                answer = pool.submit(client.post, COMPLETE, json=ASK)
                deadline = time.monotonic() + LIMIT_S
                while not metric(client, "aserve_requests_running"):
                    assert time.monotonic() < deadline
                assert cli.main(["doctor", server.url]) == 1
            finally:
                os.kill(pid, signal.SIGCONT)
            assert answer.result().status_code == 200
        out = capsys.readouterr().out
        assert "did not answer: rank 1\n" in out
        assert "missing: rank 1\n" in out
        lines = out.splitlines()
        assert any(line.startswith("1     pp 1") and "does not answer" in line for line in lines)
        assert client.get("/ready").status_code == 200
