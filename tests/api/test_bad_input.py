"""What must be refused gets a clear 4xx in OpenAI's shape, and the server still serves."""

import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.serving import Running, post

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
DEEP_SCHEMA: dict[str, Any] = {"type": "object"}
for _ in range(40):
    DEEP_SCHEMA = {"type": "object", "properties": {"a": DEEP_SCHEMA}}


def refused(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has exactly OpenAI's keys."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


def still_serves(server: Running) -> None:
    with server.client() as client:
        response = client.post(COMPLETE, json={"prompt": "x", "max_tokens": 1})
    assert response.status_code == 200


BAD_FIELDS = [
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", -5, "max_tokens"),
    ("max_tokens", 10_000, "max_tokens"),
    ("max_tokens", "5", "max_tokens"),
    ("max_tokens", 1.5, "max_tokens"),
    ("max_tokens", 10**30, "max_tokens"),
    ("temperature", -0.1, "temperature"),
    ("temperature", "hot", "temperature"),
    ("temperature", True, "temperature"),
    ("top_p", 0, "top_p"),
    ("top_p", 1.1, "top_p"),
    ("top_k", -2, "top_k"),
    ("min_p", 2, "min_p"),
    ("n", 0, "n"),
    ("n", 10**6, "n"),
    ("presence_penalty", 3, "presence_penalty"),
    ("repetition_penalty", 0, "repetition_penalty"),
    ("stop", [""], "stop"),
    ("stop", ["x"] * 100, "stop"),
    ("stop", 5, "stop"),
    ("logit_bias", {"x": 1}, "logit_bias"),
    ("logit_bias", {"5": 1000}, "logit_bias"),
    ("logit_bias", {"100000": 1}, "logit_bias"),
    ("stop_token_ids", [-1], "stop_token_ids[0]"),
    ("stream", "yes", "stream"),
    ("stream_options", {"include_usage": True}, "stream_options"),
    ("seed", 2**70, "seed"),
    ("min_tokens", 100, "min_tokens"),
    ("prompt_logprobs", 100, "prompt_logprobs"),
    ("use_beam_search", True, "use_beam_search"),
    ("response_format", {"type": "xml"}, "response_format.type"),
    ("response_format", {"type": "json_schema"}, "response_format.json_schema"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs.regex"),
    ("structured_outputs", {"regex": "("}, None),
    ("structured_outputs", {"grammar": "start: ("}, None),
    ("structured_outputs", {"json": DEEP_SCHEMA}, None),
    ("structured_outputs", {"json": {"type": "nonsense"}}, None),
    ("structured_outputs", {"regex": "a" * 70_000}, None),
    ("guided_json", "{", None),
    ("model", "gpt-4", "model"),
    ("model", 5, "model"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize(("field", "value", "param"), BAD_FIELDS)
def test_bad_field_is_named(
    server: Running, path: str, field: str, value: object, param: str | None
) -> None:
    body = {"messages": HELLO, "prompt": "hi", "max_tokens": 5, field: value}
    with server.client() as client:
        error = refused(client.post(path, json=body), 404 if value == "gpt-4" else 400)
    assert param is None or error["param"] == param


BAD_COMPLETIONS = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", [1]]},
    {"prompt": [1, "a"]},
    {"prompt": [-1]},
    {"prompt": [10**6]},
    {"prompt": [1.5]},
    {"prompt": None},
    {"prompt": {"text": "x"}},
    {},
    {"prompt": "word " * 1000},
    {"prompt": ["a"] * 1000},
    {"prompt": "a", "logprobs": 1000},
    {"prompt": "a", "logprobs": True},
    {"prompt": "a", "best_of": 3},
    {"prompt": "a", "suffix": "b"},
]


@pytest.mark.parametrize("body", BAD_COMPLETIONS, ids=lambda body: json.dumps(body)[:40])
def test_bad_completion_is_refused(server: Running, body: dict[str, object]) -> None:
    with server.client() as client:
        refused(client.post(COMPLETE, json=body), 400)


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "modalities": ["audio"]}, "modalities"),
    ({"messages": HELLO, "functions": [{}]}, "functions"),
    ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD_CHATS)
def test_bad_chat_is_refused(server: Running, body: dict[str, object], param: str) -> None:
    with server.client() as client:
        assert refused(client.post(CHAT, json=body), 400)["param"] == param


BAD_BODIES = [
    (b"", 400),
    (b"   ", 400),
    (b"{", 400),
    (b"[]", 400),
    (b'"x"', 400),
    (b'{"prompt": "x",}', 400),
    (b'{"prompt": NaN}', 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": Infinity}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "\\ud800"}', 400),
    (b'{"prompt": "x", "y": ' + b"[" * 100_000, 400),
    (b'{"prompt": "x", "y": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    (b'{"prompt": "x", "y": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001, 400),
    (b'{"prompt": "x"} trailing', 400),
    (b"x" * (9 << 20), 413),
]


@pytest.mark.parametrize(("body", "status"), BAD_BODIES, ids=lambda value: repr(value)[:30])
def test_bad_body_is_refused(server: Running, body: bytes, status: int) -> None:
    with server.client() as client:
        headers = {"content-type": "application/json"}
        refused(client.post(COMPLETE, content=body, headers=headers), status)
        chunked = (body[start : start + 65536] for start in range(0, len(body), 65536))
        refused(client.post(COMPLETE, content=chunked, headers=headers), status)
    still_serves(server)


def test_other_content_types_are_refused(server: Running) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    with server.client() as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            response = client.post(COMPLETE, content=body, headers={"content-type": kind})
            refused(response, 415)
        for kind in ("application/json; charset=utf-8", "application/vnd.x+json"):
            response = client.post(COMPLETE, content=body, headers={"content-type": kind})
            assert response.status_code == 200
        assert client.post(COMPLETE, content=body).status_code == 200


def test_wrong_method_and_route(server: Running) -> None:
    with server.client() as client:
        response = client.get(CHAT)
        assert refused(response, 405)["code"] == "method_not_allowed"
        assert response.headers["allow"] == "POST"
        assert refused(client.get("/v1/nothing"), 404)["code"] == "route_not_found"
        assert refused(client.post("/v1/embeddings", json={"input": "x"}), 400)


def test_unknown_fields_are_ignored(server: Running) -> None:
    body = {"prompt": "x", "max_tokens": 1, "vendor_extra": {"a": [1]}, "user": "me"}
    with server.client() as client:
        assert client.post(COMPLETE, json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_regex_that_explodes_while_drawing_is_the_requests_fault(
    server: Running, *, stream: bool
) -> None:
    regex = "(?:a?){5000}a{5000}"
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": regex}}
    with server.client() as client:
        response = client.post(COMPLETE, json={**body, "stream": stream})
    if response.status_code == 200:  # the first token could be drawn
        assert stream
    else:
        assert response.status_code == 400
    assert '"code":"grammar_failed"' in response.text


def test_wishes_that_exclude_each_other_are_the_requests_fault(server: Running) -> None:
    wishes = {"structured_outputs": {"choice": ["yes"]}, "bad_words": [*"yes", "ye", "es", "yes"]}
    with server.client() as client:
        response = client.post(COMPLETE, json={"prompt": "x", "max_tokens": 9, **wishes})
    assert refused(response, 400)["code"] == "nothing_to_draw"


@pytest.mark.parametrize("regex", ["(a|a)*(a|aa)+(.*.*.*)*b", "(a{1,1000}){1,1000}{1,1000}b"])
def test_catastrophic_regex_ends_in_time(server: Running, regex: str) -> None:
    body = {"prompt": "x", "max_tokens": 30, "structured_outputs": {"regex": regex}}
    with server.client() as client:
        assert client.post(COMPLETE, json=body).status_code in (200, 400)
    still_serves(server)


RAW = [
    b"\x00" * 100,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 300_000 + b"\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nBad Header: 1\r\n\r\n",
]


@pytest.mark.parametrize("data", RAW, ids=lambda data: repr(data[:30]))
def test_what_is_no_http_gets_a_400_and_a_close(server: Running, data: bytes) -> None:
    head, _, body = server.exchange(data).partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert 400 <= status < 500 or status == 501
    length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
    assert set(json.loads(body[:length])["error"]) == {"message", "type", "param", "code"}
    still_serves(server)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_noise_never_stops_the_server(server: Running, data: bytes) -> None:
    server.exchange(data)
    server.exchange(post(COMPLETE, data))
    with server.client() as client:
        assert client.get("/health").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
FIELDS = (
    *("messages", "prompt", "n", "max_tokens", "temperature", "stop", "logit_bias", "tools"),
    *("response_format", "structured_outputs", "stream_options", "logprobs", "tool_choice"),
    *("bad_words", "priority", "cache_salt", "chat_template_kwargs", "stream", "echo"),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    st.sampled_from((CHAT, COMPLETE)), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)
)
def test_any_json_is_answered_without_a_500(
    server: Running, path: str, extra: dict[str, object]
) -> None:
    body = {"messages": HELLO, "prompt": "hi", "max_tokens": 2, **extra}
    with server.client() as client:
        content = json.dumps(body).encode()
        response = client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 429), (body, response.text)
