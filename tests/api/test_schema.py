"""Every answer and chunk against the official package's types: no key missing, and none invented
but what is listed here."""

import json
import pathlib
import types
import typing
from typing import Any

import pydantic
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.api.serving import Running, config_of, events_of, running

MESSAGES = [{"role": "user", "content": "Say something"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHUNK = {"id", "object", "created", "model", "system_fingerprint", "choices"}
CHOICE = {"index", "logprobs", "finish_reason"}
USAGE = {
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "prompt_tokens_details",
    "target_steps",
}
EXTENSIONS: dict[type, set[str]] = {CompletionUsage: {"target_steps"}}


def check(kind: Any, value: Any, where: str = "$") -> None:
    """`value` is of `kind`, and no object in it has a key its type does not know, extensions
    aside."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        check(args[0], value, where)
    elif origin in (typing.Union, types.UnionType):
        if value is None:
            assert type(None) in args, where
            return
        fitting = [arg for arg in args if arg is not type(None) and _fits(arg, value)]
        assert fitting, (where, value)
        check(fitting[0], value, where)
    elif origin is list:
        for place, item in enumerate(value):
            check(args[0], item, f"{where}[{place}]")
    elif isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        kind.model_validate(value, strict=True)
        assert set(value) - EXTENSIONS.get(kind, set()) <= set(kind.model_fields), where
        for name, field in kind.model_fields.items():
            assert name in value or not field.is_required(), f"{where}.{name}"
            if name in value:
                check(field.annotation, value[name], f"{where}.{name}")


def _fits(kind: Any, value: Any) -> bool:
    try:
        pydantic.TypeAdapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError:
        return False
    return True


def ask(server: Running, path: str, **body: Any) -> dict[str, Any]:
    with server.client() as client:
        response = client.post(path, json={"model": "tiny", "seed": 1, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    answer: dict[str, Any] = response.json()
    return answer


def stream(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.client() as client:
        response = client.post(path, json={"model": "tiny", "seed": 1, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}, {"tools": [TOOL]}]
)
def test_chat_chunks_are_openais(
    server: Running, include_usage: bool, extra: dict[str, object]
) -> None:
    options = {"include_usage": True} if include_usage else {}
    chunks = stream(
        server,
        "/v1/chat/completions",
        messages=MESSAGES,
        max_tokens=6,
        ignore_eos=True,
        stream_options=options,
        **extra,
    )
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
        assert set(chunk) == (CHUNK | {"usage"} if include_usage else CHUNK)
        for choice in chunk["choices"]:
            assert set(choice) == CHOICE | {"delta"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert set(last["usage"]) == USAGE
        assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(int(str(extra.get("n", 1)))):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        first, *middle, end = own
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all(set(choice["delta"]) == {"content"} for choice in middle)
        assert end["delta"] == {}
        assert end["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None for choice in (first, *middle))


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"n": 2}, {"echo": True, "logprobs": 0}])
def test_completion_chunks_are_openais(server: Running, extra: dict[str, object]) -> None:
    chunks = stream(
        server,
        "/v1/completions",
        prompt="Say",
        max_tokens=6,
        ignore_eos=True,
        stream_options={"include_usage": True},
        **extra,
    )
    last = chunks.pop()
    check(Completion, last)
    assert (last["choices"], set(last["usage"])) == ([], USAGE)
    reasons = []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        if choice["logprobs"] and choice["logprobs"]["token_logprobs"][0] is None:
            # Nothing predicts the first prompt token; OpenAI's own null, which its type forgot.
            for name in ("token_logprobs", "top_logprobs"):
                choice["logprobs"][name].pop(0)
        reasons.append(choice["finish_reason"])
        # The package's type of a chunk is that of an answer, whose finish_reason is never null.
        check(Completion, {**chunk, "choices": [{**choice, "finish_reason": "stop"}]})
        assert set(chunk) == CHUNK | {"usage"}
        assert chunk["usage"] is None
        assert set(choice) == CHOICE | {"text"}
    n = int(str(extra.get("n", 1)))
    assert reasons.count("length") == n
    assert reasons.count(None) == len(reasons) - n


@pytest.mark.parametrize("extra", [{}, {"logprobs": True, "top_logprobs": 2}, {"n": 2}])
def test_chat_answers_are_openais(server: Running, extra: dict[str, object]) -> None:
    answer = ask(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=5, **extra)
    check(ChatCompletion, answer)
    assert set(answer) == CHUNK | {"usage"}
    assert set(answer["usage"]) == USAGE
    for choice in answer["choices"]:
        assert set(choice) == CHOICE | {"message"}
        assert set(choice["message"]) == {"role", "content", "refusal"}


def test_forced_tool_call_is_openais(server: Running) -> None:
    asked = {
        "messages": MESSAGES,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "structured_outputs": None,
    }
    function = {**TOOL["function"], "parameters": {"const": {"a": 1}}}  # type: ignore[dict-item]
    asked["tools"] = [{**TOOL, "function": function}]
    answer = ask(server, "/v1/chat/completions", **asked)
    check(ChatCompletion, answer)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    chunks = stream(server, "/v1/chat/completions", **asked)
    for chunk in chunks:
        check(ChatCompletionChunk, chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    pieces = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert set(pieces[0]) == {"index", "id", "type", "function"}
    assert all(set(piece) == {"index", "function"} for piece in pieces[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"n": 2}])
def test_completion_answers_are_openais(server: Running, extra: dict[str, object]) -> None:
    answer = ask(server, "/v1/completions", prompt="Say", max_tokens=5, **extra)
    check(Completion, answer)
    assert set(answer) == CHUNK | {"usage"}
    for choice in answer["choices"]:
        assert set(choice) == CHOICE | {"text"}


def test_prompt_logprobs_come_as_vllm_writes_them(server: Running) -> None:
    answer = ask(server, "/v1/completions", prompt=[5, 6, 7], max_tokens=1, prompt_logprobs=2)
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in rest] == ["6", "7"]
    for entry in rest:
        assert set(next(iter(entry.values()))) == {"logprob", "decoded_token"}


def test_thinking_is_told_apart_from_the_answer(tiny_model_path: pathlib.Path) -> None:
    config = config_of(
        tiny_model_path,
        model={"path": str(tiny_model_path), "name": "tiny", "reasoning_parser": "qwen3"},
    )
    body = {"messages": MESSAGES, "structured_outputs": {"regex": "<think>hm hm</think>(yes|no)"}}
    with running(config) as server:
        path = "/v1/chat/completions"
        message = ask(server, path, **body)["choices"][0]["message"]
        hidden = ask(server, path, **body, include_reasoning=False)["choices"][0]["message"]
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(server, path, **body)]
    assert message.pop("reasoning_content") == "hm hm"  # DeepSeek's addition, which clients use
    assert message["content"] in ("yes", "no")
    assert hidden == message
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm hm"
    assert "".join(delta.get("content", "") for delta in deltas) == message["content"]


def test_models_are_openais(server: Running) -> None:
    with server.client() as client:
        listed = client.get("/v1/models").json()
        (model,) = listed["data"]
        assert client.get("/v1/models/tiny").json() == model
        assert client.get("/v1/models/other").status_code == 404
    assert set(listed) == {"object", "data"}
    assert model.pop("max_model_len") == 512  # vLLM's addition, which clients use
    check(Model, model)
