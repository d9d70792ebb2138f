"""The pieces without a socket: bodies, formats, log-probabilities, readers of text."""

import itertools
import json
from typing import Any, cast

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from aserve.api.body import Bodies, ClientGone, check_depth
from aserve.api.chat import Reader, Reading, message_of
from aserve.api.chunks import UsageTally, usage_of
from aserve.api.logprobs import LOWEST, CompletionLogprobs, TokenNames
from aserve.api.messages import plain_messages, teach_tools
from aserve.api.params import structured_of
from aserve.api.protocol import Generate, Message
from aserve.api.server import is_loopback
from aserve.api.service import Service
from aserve.api.web import bind, url_of
from aserve.core.config import Config, Layout
from aserve.core.message import TokenLogprob
from aserve.core.request import StructuredOutput, Usage
from aserve.errors import ConfigError, RequestError
from aserve.text.tokenizer import Tokenizer


def depth_of(value: object) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 0


JSON = st.recursive(
    st.text(alphabet='[]{}"\\a') | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('{}"\\'), inner, max_size=3)
    ),
    max_leaves=20,
)


@given(JSON)
def test_depth_is_bounded_whatever_the_strings_hold(value: object) -> None:
    body, depth = json.dumps(value).encode(), depth_of(value)
    check_depth(body, depth)
    if depth > 2:
        with pytest.raises(RequestError):
            # One pass may take two levels away, `[{}]`, so half the depth is surely refused.
            check_depth(b"[" * depth + body + b"]" * depth, (depth - 1) // 2)


def read(bodies: Bodies, *messages: dict[str, Any]) -> bytes:
    waiting = list(messages)

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return waiting.pop(0)

    return trio.run(bodies.read, {"headers": []}, receive)


def part(data: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


def test_body_comes_in_parts_up_to_its_limit() -> None:
    bodies = Bodies(4, 1.0)
    assert read(bodies, part(b"ab"), part(b""), part(b"cd", more=False)) == b"abcd"
    with pytest.raises(RequestError) as caught:
        read(bodies, part(b"ab"), part(b"cde", more=False))
    assert caught.value.status == 413
    with pytest.raises(ClientGone):
        read(bodies, part(b"ab"), {"type": "http.disconnect"})


async def test_all_bodies_together_have_a_limit(autojump_clock: trio.testing.MockClock) -> None:
    bodies = Bodies(100, 1000.0)
    statuses: list[int] = []

    async def send_slowly() -> None:
        waiting = [part(b"x" * 99), part(b"", more=False)]

        async def receive() -> dict[str, Any]:
            await trio.sleep(1)
            return waiting.pop(0)

        try:
            await bodies.read({"headers": []}, receive)
            statuses.append(200)
        except RequestError as error:
            statuses.append(error.status)

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(send_slowly)
    assert statuses.count(200) == 32
    assert statuses.count(429) == 8
    await send_slowly()
    assert statuses[-1] == 200


class Alphabet:
    """A tokenizer of which each token is a given piece; the last is special."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def is_special(self, token: int) -> bool:
        return token == len(self._pieces)

    def special_text(self, token: int) -> str:
        return "<end>"

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token]


def names_of(*pieces: bytes) -> TokenNames:
    return TokenNames(cast(Tokenizer, Alphabet(*pieces)))


def test_offsets_count_characters_however_tokens_split_them() -> None:
    names = names_of(b"a", "é".encode()[:1], "é".encode()[1:], "日本".encode(), b"z")
    writer = CompletionLogprobs(names, skip_special=True)
    first = writer.part([0, 1], [None, TokenLogprob(1, -1.0, ((0, -2.0),))])
    second = writer.part([2, 3, 5, 4], [TokenLogprob(token, -1.0, ()) for token in (2, 3, 5, 4)])
    assert first["text_offset"] + second["text_offset"] == [0, 1, 1, 2, 4, 4]
    assert first["tokens"] + second["tokens"] == [
        "a",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "日本",
        "<end>",
        "z",
    ]
    assert first["top_logprobs"] == [None, {"a": -2.0, "bytes:\\xc3": -1.0}]
    assert first["token_logprobs"] == [None, -1.0]


def test_infinite_logprobs_stay_numbers() -> None:
    (entry,) = names_of(b"a").chat([TokenLogprob(0, float("-inf"), ((0, float("-inf")),))])
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == LOWEST
    assert json.loads(msgspec.json.encode(entry))["logprob"] == LOWEST


@given(st.data())
def test_reader_finds_reasoning_content_and_calls_in_any_chunks(data: st.DataObject) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
    text = f"<think>why</think>Well.\n{call}\n{call}"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    reader = Reader(Reading(tools=True, reasoning="before"))
    pieces = []
    for start, end in itertools.pairwise(bounds):
        pieces += reader.read(text[start:end], last=False)
    pieces += reader.read("", last=True)
    message = message_of(pieces)
    assert message["reasoning_content"] == "why"
    assert message["content"] == "Well."
    assert [made["function"] for made in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"x": "</tool_call>"}'}
    ] * 2
    assert len({made["id"] for made in message["tool_calls"]}) == 2
    assert reader.called


def test_only_one_call_is_told_if_only_one_is_wanted() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    reader = Reader(Reading(tools=True, calls_max=1))
    message = message_of(reader.read(call * 3, last=True))
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None


def test_reasoning_can_be_left_out() -> None:
    reader = Reader(Reading(reasoning="inside", shows_reasoning=False))
    message = message_of(reader.read("hm</think>so", last=True))
    assert message == {"role": "assistant", "content": "so", "refusal": None}


def messages_of(*values: dict[str, Any]) -> list[Message]:
    return msgspec.convert(list(values), list[Message])


def test_messages_become_what_templates_know() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    plain = plain_messages(
        messages_of(
            {"role": "developer", "content": "Be kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
        )
    )
    assert [message["role"] for message in plain] == ["system", "user", "assistant", "tool"]
    assert plain[1]["content"] == "ab"
    assert plain[2]["content"] == ""
    assert plain[2]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_template_without_tools_is_taught_them_in_text() -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    messages = plain_messages(
        messages_of(
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "ok", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "2"},
        )
    )
    taught = teach_tools(messages, [{"type": "function", "function": {"name": "f"}}])
    assert taught[0]["content"].startswith("Be kind.\n\n")
    assert '{"type": "function", "function": {"name": "f"}}' in taught[0]["content"]
    assert taught[2]["content"] == (
        'ok\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    )
    assert taught[3] == {"role": "user", "content": "<tool_response>\n2\n</tool_response>"}
    assert teach_tools(messages[1:2], [{}])[0]["role"] == "system"
    assert teach_tools(messages[:2], []) == messages[:2]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            StructuredOutput(json={"a": 1}),
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, StructuredOutput(json={"a": 1})),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(json_object=True)),
        ({"guided_choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"guided_grammar": "start: A"}, StructuredOutput(grammar="start: A")),
        ({"guided_regex": "", "response_format": {"type": "text"}}, StructuredOutput(regex="")),
    ],
)
def test_every_spelling_of_a_format_means_the_same(
    fields: dict[str, Any], expected: StructuredOutput | None
) -> None:
    assert structured_of(msgspec.convert(fields, Generate)) == expected


def test_a_prompt_counts_once_however_many_choices_share_it() -> None:
    tally = UsageTally()
    for usage in (Usage(10, 3, 4, 2), Usage(10, 5, 10, 3)):
        tally.add(0, usage)
    tally.add(1, Usage(7, 1, 0, 1))
    assert usage_of(tally.prompts) == {
        "prompt_tokens": 17,
        "completion_tokens": 9,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 4},
        "target_steps": 6,
    }


def test_ids_in_use_get_a_suffix_and_are_found_by_any_name() -> None:
    service = Service(Config())
    first, second = (service.claim_id("chatcmpl-a-b") for _ in range(2))
    assert (first, second) == ("chatcmpl-a-b", "chatcmpl-a-b-2")
    assert service.ids_of("a-b") == service.ids_of("chatcmpl-a-b") == [first, second]
    assert service.ids_of(second) == [second]
    assert service.ids_of("b") == []
    service.release_id(first)
    assert service.claim_id("chatcmpl-a-b") == first


def test_localhost_binds_one_port_for_all_its_addresses() -> None:
    sockets = bind("localhost", 0)
    try:
        assert len({opened.getsockname()[1] for opened in sockets}) == 1
        assert url_of(sockets).startswith("http://")
    finally:
        for opened in sockets:
            opened.close()


def test_host_that_is_none_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        bind("no such host", 0)
    with pytest.raises(ConfigError, match="cannot be bound"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("x.org", False)],
)
def test_only_loopback_is_served_without_a_warning(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_service_without_an_engine_says_so() -> None:
    service = Service(Config())
    assert (service.ready, service.loaded, service.failure) == (False, False, None)
    with pytest.raises(RequestError) as caught:
        service.check_model("tiny")
    assert caught.value.status == 503
    service.close()
    with pytest.raises(RequestError, match="shutting down"):
        service.check_open()


def test_a_server_of_several_ranks_says_that_it_waits_for_all_of_them() -> None:
    """Its own share of the model may long be there."""
    assert Service(Config()).unready() == ("loading", "the model is still loading")
    service = Service(Config(layout=Layout(pp=2, tp=3)))
    reason = "not all 6 ranks have loaded, joined and been measured yet"
    assert service.unready() == ("loading", reason)
