"""What a server does beside completions: keys, ids, limits, metrics, signals, loading."""

import json
import logging
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import openai
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

import aserve
from aserve.api.edge import Edge
from aserve.api.log import JsonLines, TextLines
from aserve.api.server import open_server
from aserve.api.service import Service
from aserve.core.config import Config
from aserve.errors import ConfigError
from tests.api.serving import LIMIT_S, Running, config_of, events_of, post, running
from tests.braking import braked

COMPLETE = "/v1/completions"
SERVE = """
import msgspec, sys, trio
from aserve.api.server import serve
from aserve.core.config import Config
config = msgspec.json.decode(sys.argv[1], type=Config)
trio.run(lambda: serve(config, ready=lambda url: print(url, flush=True)))
print("ended", flush=True)
"""


def test_key_covers_every_route_but_health(tiny_model_path: pathlib.Path) -> None:
    with (
        running(config_of(tiny_model_path, server={"port": 0, "api_key": "sécret"})) as server,
        server.client() as client,
    ):
        for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/v1/completions"):
            response = client.get(path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
        for wrong in ("Bearer", "Bearer wrong", "Basic sécret", "sécret", "Bearer sécret x"):
            headers = {"authorization": wrong.encode()}
            assert client.get("/v1/models", headers=headers).status_code == 401
        right = {"authorization": "Bearer sécret".encode()}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 200
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as official,
            pytest.raises(openai.AuthenticationError),
        ):
            official.models.list()


def test_full_queue_is_a_429_with_retry_after(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, schedule={"running_max": 1, "waiting_max": 2})
    with (
        running(config) as server,
        server.client() as client,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as official,
        braked(4),  # the first is never over before the queue was found full
    ):
        long = {"prompt": "x", "max_tokens": 480, "n": 2, "ignore_eos": True, "stream": True}
        with client.stream("POST", COMPLETE, json=long) as first, server.connect() as second:
            assert first.status_code == 200
            second.sendall(post(COMPLETE, json.dumps({**long, "n": 1}).encode()))
            engine = server.server.service.engine
            server.wait(lambda: engine.statistics().planner.waiting == 2)
            response = client.post(COMPLETE, json={"prompt": "x"})
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"
            with pytest.raises(openai.RateLimitError):
                official.completions.create(model="tiny", prompt="x")


def test_request_id_is_echoed_or_made(server: Running) -> None:
    with server.client() as client:
        for offered in ("abc-123", "x" * 128):
            response = client.post(
                COMPLETE, json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": offered}
            )
            assert response.headers["x-request-id"] == offered
            assert response.json()["id"] == f"cmpl-{offered}"
        made = {client.get("/nowhere").headers["x-request-id"] for _ in range(3)}
        assert len(made) == 3
        for bad in ("a b", "x" * 129, "é"):
            response = client.get("/health", headers={"x-request-id": bad.encode()})
            assert response.headers["x-request-id"] not in (bad, "")


def test_abort_ends_every_request_of_an_id(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 480, "n": 30, "ignore_eos": True, "stream": True}
    with server.client() as client:
        assert client.post("/abort", json={"request_id": "same"}).status_code == 404
        headers = {"x-request-id": "same"}
        with (
            client.stream("POST", COMPLETE, json=body, headers=headers) as first,
            client.stream("POST", COMPLETE, json=body, headers=headers) as second,
        ):
            aborted = client.post("/abort", json={"request_id": "same"}).json()["aborted"]
            assert aborted == ["cmpl-same", "cmpl-same-2"]
            for stream in (first, second):
                last = events_of(stream.read().decode())[-1]
                assert json.loads(last)["error"]["code"] == "request_aborted"
        assert client.post("/abort", json={"request_id": "cmpl-same"}).status_code == 404


def values(server: Running) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with server.client() as client:
        response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_metrics_count_what_happened(server: Running) -> None:
    before = values(server)
    with server.client() as client:
        body = {"prompt": [7, 8, 9], "max_tokens": 5, "ignore_eos": True}
        assert client.post(COMPLETE, json=body).status_code == 200
        assert client.post(COMPLETE, json={}).status_code == 400
    after = values(server)

    def grown(name: str, **labels: str) -> float:
        key = (name, frozenset(labels.items()))
        return after[key] - before.get(key, 0)

    assert grown("aserve_requests_total") == 1
    assert grown("aserve_prompt_tokens_total") == 3
    assert grown("aserve_generation_tokens_total") == 5
    assert grown("aserve_choices_finished_total", reason="length") == 1
    assert grown("aserve_time_to_first_token_seconds_count") == 1
    assert grown("aserve_inter_token_seconds_count") == 4
    assert grown("aserve_request_seconds_count") == 1
    assert grown("aserve_request_seconds_bucket", le="+Inf") == 1
    assert grown("aserve_steps_total") >= 5
    assert grown("aserve_target_steps_total") == 5
    assert grown("aserve_spec_drafts_total") == 0
    for status in ("200", "400"):
        labels = {"method": "POST", "route": COMPLETE, "status": status}
        assert grown("aserve_http_responses_total", **labels) == 1
    assert after["aserve_ready", frozenset()] == 1
    assert after["aserve_requests_running", frozenset()] == 0
    assert 0 <= after["aserve_prefix_hit_ratio", frozenset()] <= 1


def test_buckets_of_a_histogram_only_grow(server: Running) -> None:
    buckets = [
        (float(dict(labels)["le"]), value)
        for (name, labels), value in values(server).items()
        if name == "aserve_step_seconds_bucket"
    ]
    counts = [count for _, count in sorted(buckets)]
    assert counts == sorted(counts)
    assert len(counts) > 5


def test_text_goes_to_tokens_and_back(server: Running) -> None:
    with server.client() as client:
        text = "Grüße, 世界 🎉"
        found = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 512
        back = client.post("/detokenize", json={"tokens": found["tokens"]}).json()
        assert back == {"prompt": text}
        assert client.post("/detokenize", json={"tokens": [10**6]}).status_code == 400
        assert client.post("/tokenize", json={}).status_code == 400


def test_chat_prompt_can_be_tokenized(server: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, I"}]

    def text(client: httpx.Client, **extra: object) -> str:
        tokens = client.post("/tokenize", json={"messages": messages, **extra}).json()["tokens"]
        prompt: str = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
        return prompt

    with server.client() as client:
        said = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, I"
        ended = f"{said}<|im_end|>\n"
        assert text(client) == f"{ended}<|im_start|>assistant\n"
        assert text(client, add_generation_prompt=False) == ended
        assert text(client, continue_final_message=True) == said


def test_continued_message_is_echoed_on_request(server: Running) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}],
        "continue_final_message": True,
        "max_tokens": 4,
        "seed": 1,
    }
    with server.client() as client:
        path = "/v1/chat/completions"
        plain, echoed = (client.post(path, json={**body, "echo": echo}) for echo in (False, True))
    texts = [answer.json()["choices"][0]["message"]["content"] for answer in (plain, echoed)]
    assert texts[1] == "Well," + texts[0]


def test_cache_is_flushed_and_version_told(server: Running) -> None:
    with server.client() as client:
        client.post(COMPLETE, json={"prompt": list(range(9, 60)), "max_tokens": 1})
        assert server.planner().kv_pages_cached > 0
        assert client.post("/flush_cache").json() == {"flushed": True}
        assert server.planner().kv_pages_cached == 0
        assert client.get("/version").json() == {"version": aserve.__version__}


def test_unexpected_failure_is_a_500_with_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: object, receive: object, send: object) -> None:
        raise ArithmeticError("secret detail")

    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/x",
        "headers": [(b"x-request-id", b"my-id")],
    }
    edge = Edge(broken, Service(Config()))
    trio.run(edge, scope, receive, send)
    start, end = sent
    assert start["status"] == 500
    error = json.loads(end["body"])["error"]  # type: ignore[arg-type]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "my-id" in error["message"]
    assert "secret" not in error["message"]
    assert "ArithmeticError: secret detail" in caplog.text


def test_taken_port_is_a_config_error(tiny_model_path: pathlib.Path) -> None:
    async def serve(port: int) -> None:
        config = config_of(tiny_model_path, server={"port": port})
        async with open_server(config):
            raise AssertionError("two servers on one port")

    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigError, match="is taken by another process"),
    ):
        trio.run(serve, other.getsockname()[1])


def test_model_that_is_not_there_is_an_error_and_frees_the_port(tmp_path: pathlib.Path) -> None:
    async def serve() -> None:
        async with open_server(config_of(tmp_path / "nothing")):
            raise AssertionError("served without a model")

    with pytest.raises(ConfigError):
        trio.run(serve)


def test_an_error_in_the_block_leaves_it_as_it_is(tiny_model_path: pathlib.Path) -> None:
    async def serve() -> None:
        async with open_server(config_of(tiny_model_path)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trio.run(serve)


def test_loading_server_is_alive_but_not_ready(tiny_model_path: pathlib.Path) -> None:
    """The loader stands still until the client has seen what a loading server says."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    loading, seen = threading.Event(), threading.Event()
    responses: list[httpx.Response] = []

    def progress(done: int, total: int, what: str) -> None:
        loading.set()
        assert seen.wait(LIMIT_S)

    def look() -> None:
        assert loading.wait(LIMIT_S)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
            responses.append(client.get("/health"))
            responses.append(client.get("/ready"))
            responses.append(client.get("/v1/models"))
            responses.append(client.post(COMPLETE, json={"prompt": "x"}))
            responses.append(client.get("/metrics"))
        seen.set()

    async def serve() -> None:
        config = config_of(tiny_model_path, server={"port": port})
        async with open_server(config, progress=progress) as server:
            assert server.service.ready

    thread = threading.Thread(target=look)
    thread.start()
    try:
        trio.run(serve)
    finally:
        seen.set()
        thread.join()
    assert [response.status_code for response in responses] == [200, 503, 503, 503, 200]
    assert responses[1].json() == {"status": "loading", "reason": "the model is still loading"}
    assert responses[3].json()["error"]["code"] == "loading"
    assert all("retry-after" in response.headers for response in responses[1:4])


@contextmanager
def subprocess_server(config: Config) -> Iterator[tuple[subprocess.Popen[str], str]]:
    import msgspec

    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVE, msgspec.json.encode(config).decode()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


LONG = {"prompt": "x", "max_tokens": 400, "n": 4, "ignore_eos": True, "stream": True}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_ends_cleanly(tiny_model_path: pathlib.Path, number: int) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "drain_s": 60.0, "log_json": True})
    with subprocess_server(config) as (process, url):
        with (
            httpx.Client(base_url=url, timeout=LIMIT_S) as client,
            client.stream("POST", COMPLETE, json=LONG, headers={"x-request-id": "r1"}) as stream,
        ):
            process.send_signal(number)
            assert events_of(stream.read().decode())[-1] == "[DONE]"
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ended\n"), err
    lines = [json.loads(line) for line in err.splitlines()]
    (line,) = (line for line in lines if line.get("request_id") == "r1")
    assert (line["status"], line["path"], line["method"]) == (200, COMPLETE, "POST")
    assert (line["prompt_tokens"], line["completion_tokens"]) == (1, 4 * 400)
    assert 0 < line["ttft_ms"] <= line["duration_ms"]


@pytest.mark.slow
def test_second_signal_ends_at_once(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "drain_s": 1000.0, "write_s": 1000.0})
    with (
        subprocess_server(config) as (process, url),
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        client.stream("POST", COMPLETE, json={**LONG, "n": 60, "logprobs": 20}),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "draining" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (0, "ended\n"), err


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("aserve.http", logging.INFO, "f", 1, message, (), None)
    made.fields = fields
    return made


def test_log_lines_hold_what_a_client_chose_without_breaking() -> None:
    made = record("request", path="/a b\n2026 INFO forged", status=200, request_id="r=\ud800")
    line = TextLines().format(made)
    assert "\n" not in line
    assert line.endswith('path="/a b\\n2026 INFO forged" status=200 request_id="r=?"')
    parsed = json.loads(JsonLines().format(made))
    assert parsed["path"] == "/a b\n2026 INFO forged"
    assert parsed["level"] == "info"
