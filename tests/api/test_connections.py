"""Clients that hang up, stall, never read or come too many: nobody else notices, nothing leaks."""

import json
import pathlib
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.serving import LIMIT_S, Running, config_of, post, read_all, running

COMPLETE = "/v1/completions"
RESET = struct.pack("ii", 1, 0)  # lingering for no time: closing resets the connection
# Many long choices: far more than any machine computes before it sees what the client does.
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 480, "n": 60, "ignore_eos": True}
# The same, in chunks too large for the sockets' buffers.
BULKY = {**LONG, "stream": True, "logprobs": 20}


def send(raw: socket.socket, body: dict[str, Any], *headers: str) -> None:
    raw.sendall(post(COMPLETE, json.dumps(body).encode(), *headers))


def read_until(raw: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        data = raw.recv(1 << 16)
        assert data, received[-500:]
        received += data
    return received


def reading(raw: socket.socket) -> Callable[[], bytes]:
    """Read to the end in another thread; call what is returned to wait for it."""
    received: list[bytes] = []
    thread = threading.Thread(target=lambda: received.append(read_all(raw)))
    thread.start()

    def wait() -> bytes:
        thread.join()
        return received[0]

    return wait


def finished(server: Running, reason: str) -> int:
    return server.call(lambda: server.server.service.engine.statistics().finished.get(reason, 0))


def is_idle(server: Running) -> bool:
    planner = server.server.service.engine.statistics().planner
    return planner.running == 0 and planner.waiting == 0 and planner.kv_pages_used == 0


@pytest.mark.parametrize("reset", [False, True])
def test_hanging_up_on_a_stream_frees_its_pages(server: Running, reset: bool) -> None:
    aborted, done = finished(server, "abort"), finished(server, "length")
    with server.connect() as raw:
        if reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        send(raw, {**LONG, "stream": True})
        read_until(raw, b"data: ")
        assert server.planner().running > 0
    server.wait(lambda: is_idle(server))
    assert finished(server, "abort") == aborted + 60
    assert finished(server, "length") == done


def test_hanging_up_while_waiting_for_an_answer_frees_its_pages(server: Running) -> None:
    aborted = finished(server, "abort")
    with server.connect() as raw:
        send(raw, LONG)
        server.wait(lambda: not is_idle(server))
    server.wait(lambda: is_idle(server))
    assert finished(server, "abort") == aborted + 60


def test_hanging_up_behind_a_pipelined_request_frees_pages(server: Running) -> None:
    aborted = finished(server, "abort")
    with server.connect() as raw:
        raw.sendall(post(COMPLETE, json.dumps(LONG).encode()) + b"GET /health HTTP/1.1\r\n\r\n")
        server.wait(lambda: not is_idle(server))
    server.wait(lambda: is_idle(server))
    assert finished(server, "abort") == aborted + 60


def test_answer_to_a_client_that_has_gone_leaves_no_connection(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing it fails, and no idle time begins after it."""
    reader = server.server.service.prompts._reader
    encode, started, gone = reader.encode, threading.Event(), threading.Event()

    def encode_late(text: str, *, special: bool = True) -> tuple[int, ...]:
        started.set()
        assert gone.wait(LIMIT_S)
        return encode(text, special=special)

    monkeypatch.setattr(reader, "encode", encode_late)
    with server.connect() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        # Long enough to be tokenized in a thread.
        raw.sendall(post("/tokenize", json.dumps({"prompt": "word " * 2000}).encode()))
        assert started.wait(LIMIT_S)
    for _ in range(2):  # the reset is seen before what comes after it
        server.exchange(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    gone.set()
    server.wait(lambda: server.server.web.connections == 0)


def test_hanging_up_before_the_body_is_complete_is_nothing(server: Running) -> None:
    with server.connect() as raw:
        raw.sendall(post(COMPLETE, b'{"prompt": "x"}')[:-5])
    server.wait(lambda: not server.server.service.calls)


def test_connection_is_kept_after_a_stream(server: Running) -> None:
    with server.connect() as raw:
        for _ in range(3):
            send(raw, {"prompt": "x", "max_tokens": 3, "stream": True})
            assert b"data: [DONE]\n\n" in read_until(raw, b"0\r\n\r\n")
        send(raw, {"prompt": "x", "max_tokens": 1})
        assert b'"usage"' in read_until(raw, b"}}")
    server.wait(lambda: server.server.web.connections == 0)


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    request = post("/tokenize", b'{"prompt": "one"}') + post("/detokenize", b'{"tokens": [9]}')
    with server.connect() as raw:
        raw.sendall(request + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_until(raw, b'"alive"}')
    places = [answer.find(part) for part in (b'"count"', b'"prompt"', b'"alive"')]
    assert places == sorted(places)
    assert places[0] > 0


def test_client_that_expects_100_gets_it(server: Running) -> None:
    head, body = post("/tokenize", b'{"prompt": "x"}', "Expect: 100-continue").split(b"\r\n\r\n")
    with server.connect() as raw:
        raw.sendall(head + b"\r\n\r\n")
        assert read_until(raw, b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        raw.sendall(body)
        assert b"200" in read_until(raw, b"}").splitlines()[0]


def test_http_1_0_stream_ends_with_the_connection(server: Running) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
    with server.connect() as raw:
        raw.sendall(post(COMPLETE, body, version="1.0"))
        assert read_all(raw).endswith(b"data: [DONE]\n\n")


def test_early_refusal_reaches_a_client_that_is_still_sending(server: Running) -> None:
    with server.connect() as raw:
        raw.sendall(post("/nowhere", b"x" * (3 << 20)))
        assert b"404" in read_until(raw, b"}}").splitlines()[0]
        send(raw, {"prompt": "x", "max_tokens": 1})
        assert b"200" in read_until(raw, b"}}").splitlines()[0]


def test_client_that_reads_nothing_is_cut_off(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "write_s": 0.2})
    with running(config) as server, server.connect() as raw:
        send(raw, BULKY)
        server.wait(lambda: not is_idle(server))
        server.wait(lambda: is_idle(server))
        assert finished(server, "abort") == 60
        server.wait(lambda: server.server.web.connections == 0)


def test_client_that_reads_nothing_does_not_hold_up_shutdown(
    tiny_model_path: pathlib.Path,
) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "write_s": 1000.0, "drain_s": 0.1})
    with running(config) as server:
        raw = server.connect()
        send(raw, BULKY)
        server.wait(lambda: not is_idle(server))
    raw.close()


def test_drain_tells_streams_that_it_is_over(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "drain_s": 0.1})
    with running(config) as server:
        raw = server.connect()
        send(raw, {**LONG, "stream": True})
        read_until(raw, b"data: ")
        rest = reading(raw)
    with raw:
        assert b'"code":"shutting_down"' in rest()


def test_drain_lets_streams_end(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "drain_s": 60.0})
    with running(config) as server:
        raw, idle = server.connect(), server.connect()
        send(raw, {**LONG, "n": 2, "stream": True})
        read_until(raw, b"data: ")
        rest = reading(raw)
    with raw, idle:
        assert b"data: [DONE]\n\n" in rest()
        assert read_all(idle) == b""


def test_surplus_connections_are_refused(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "connections_max": 2})
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(config) as server:
        with server.connect() as first, server.connect() as second:
            for raw in (first, second):
                raw.sendall(health)
                read_until(raw, b'"alive"}')
            with server.connect() as third:
                assert read_all(third).startswith(b"HTTP/1.1 503 ")
        server.wait(lambda: server.server.web.connections == 0)
        assert b" 200 " in server.exchange(health)


def test_idle_connection_is_closed(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "keep_alive_s": 0.1})
    with running(config) as server, server.connect() as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(raw).endswith(b'{"status":"alive"}')


def test_body_that_never_comes_is_refused(tiny_model_path: pathlib.Path) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "read_s": 0.1})
    with running(config) as server, server.connect() as raw:
        raw.sendall(post(COMPLETE, b'{"prompt": "x"}')[:-1])
        assert read_until(raw, b"}}").startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("stream", [False, True])
def test_request_has_a_time_limit(tiny_model_path: pathlib.Path, stream: bool) -> None:
    config = config_of(tiny_model_path, server={"port": 0, "request_s": 0.2})
    with running(config) as server, server.connect() as raw:
        send(raw, {**LONG, "stream": stream}, "Connection: close")
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
        assert b'"code":"request_timeout"' in answer
        assert b"[DONE]" not in answer
        server.wait(lambda: is_idle(server))


def test_death_of_the_engine_is_told_to_everybody(tiny_model_path: pathlib.Path) -> None:
    with running(config_of(tiny_model_path)) as server:
        raw = server.connect()
        send(raw, {**LONG, "stream": True})
        read_until(raw, b"data: ")
        rest = reading(raw)
        server.call(lambda: server.server.service.engine._supervisor._give_up("told to"))
        with server.client() as client:
            assert client.get("/health").json() == {"status": "failed", "reason": "told to"}
            failed = {"status": "failed", "reason": "told to"}
            assert client.get("/ready").json() == failed
            response = client.post(COMPLETE, json={"prompt": "x"})
        assert response.status_code == 503
        assert "told to" in response.json()["error"]["message"]
    with raw:
        assert b'"code":"engine_error"' in rest()


@pytest.mark.parametrize(
    "target", [b"http://x/health", b"HTTP://x:80/health?a=1", b"https://x/health"]
)
def test_absolute_targets_are_answered_like_their_paths(server: Running, target: bytes) -> None:
    answer = server.exchange(b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 "), answer


def test_an_absolute_target_without_a_path_is_the_root(server: Running) -> None:
    answer = server.exchange(b"GET http://x?a=1 HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    assert b"'/'" in answer


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/"])
def test_a_trailing_slash_is_another_route(server: Running, path: str) -> None:
    answer = server.exchange(post(path, b"{}"))
    assert answer.startswith(b"HTTP/1.1 404 "), answer
    assert b'"route_not_found"' in answer
