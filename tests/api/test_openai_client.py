"""The official client against the real server: what it sends works, what it gets it understands."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.api.serving import LIMIT_S, Running

HELLO = [{"role": "user", "content": "Hello there"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LIMIT_S
    ) as made:
        yield made


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "aserve"


def test_chat_answers_and_counts_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=7,
        seed=1,
        extra_body={"ignore_eos": True},
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7


def test_chat_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 20, "seed": 3}
    answer = client.chat.completions.create(**asked)
    text, reasons, usage = "", [], None
    with client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
    assert text == answer.choices[0].message.content
    assert reasons[-1] == answer.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert usage is not None
    assert answer.usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_stream_helper_assembles_the_message(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, max_tokens=9, seed=3
    ) as stream:
        stream.until_done()
        final = stream.current_completion_snapshot
    plain = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=9, seed=3)
    assert final.choices[0].message.content == plain.choices[0].message.content


def test_n_choices_differ_and_repeat_under_a_seed(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 5, "n": 3}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    streamed = ["", "", ""]
    with client.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_prompts_of_every_kind_give_the_same_completion(client: OpenAI) -> None:
    ids = client.post("/../tokenize", body={"prompt": "Once upon"}, cast_to=dict)["tokens"]
    asked = {"model": "tiny", "max_tokens": 8, "temperature": 0, "seed": 1}
    kinds = ("Once upon", ["Once upon"], ids, [ids])
    texts = {client.completions.create(prompt=kind, **asked).choices[0].text for kind in kinds}
    assert len(texts) == 1


def test_many_prompts_with_n_are_numbered_prompt_first(client: OpenAI) -> None:
    asked = {"model": "tiny", "max_tokens": 6, "seed": 2, "n": 2}
    alone = [client.completions.create(prompt=text, **asked) for text in ("One", "Two", "Three")]
    together = client.completions.create(prompt=["One", "Two", "Three"], **asked)
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in together.choices] == expected
    assert [choice.index for choice in together.choices] == list(range(6))
    streamed = [""] * 6
    with client.completions.create(prompt=["One", "Two", "Three"], **asked, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert streamed == expected


def test_echo_gives_the_prompt_back_with_its_logprobs(client: OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Once upon a time", max_tokens=4, echo=True, logprobs=2, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text.startswith("Once upon a time")
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.text_offset is not None
    assert "".join(found.tokens).startswith("Once upon a time")
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token


def test_chat_logprobs_spell_the_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    spelled = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert spelled.decode(errors="replace").startswith(choice.message.content or "")
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)


def test_streamed_logprobs_are_those_of_the_answer(client: OpenAI) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 9, "seed": 4, "logprobs": True}
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].logprobs is not None
    streamed = []
    with client.chat.completions.create(**asked, stream=True) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    streamed.extend(choice.logprobs.content or ())
    assert streamed == answer.choices[0].logprobs.content


def test_json_schema_is_obeyed(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "size", "schema": schema}},
    )
    text = answer.choices[0].message.content
    assert text is not None
    assert json.loads(text) in ({"size": "small"}, {"size": "large"})
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"structured_outputs": {"grammar": 'start: "yes" | "no"'}},
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "(yes|no)"},
    ],
)
def test_structured_outputs_are_obeyed(client: OpenAI, extra: dict[str, object]) -> None:
    answer = client.completions.create(
        model="tiny", prompt="Is it?", max_tokens=20, extra_body=extra
    )
    assert answer.choices[0].text in ("yes", "no")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_forced_tool_call_comes_whole_and_in_pieces(client: OpenAI, choice: object) -> None:
    asked = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "seed": 1,
    }
    answer = client.chat.completions.create(**asked)
    (made,) = answer.choices
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    assert made.message.tool_calls is not None
    (call,) = made.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.choices[0].message.tool_calls is not None
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments


def test_forced_tool_call_cut_by_max_tokens_is_a_call_cut_short(client: OpenAI) -> None:
    request = {
        "model": "tiny",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "seed": 1,
    }
    answer = client.chat.completions.create(**request)
    whole = answer.choices[0].message.tool_calls
    assert whole is not None
    assert answer.usage is not None
    most = answer.usage.completion_tokens - 10
    kept = client.chat.completions.create(**request, max_tokens=most).choices[0]
    assert (kept.finish_reason, kept.message.content) == ("length", None)
    assert kept.message.tool_calls is not None
    (call,) = kept.message.tool_calls
    assert call.function.name == whole[0].function.name
    assert whole[0].function.arguments.startswith(call.function.arguments)
    deltas = list(client.chat.completions.create(**request, max_tokens=most, stream=True))
    assert deltas[-1].choices[0].finish_reason == "length"
    assert not any(chunk.choices[0].delta.content for chunk in deltas)
    pieces = [one for chunk in deltas for one in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 2
    told = "".join((piece.function and piece.function.arguments) or "" for piece in pieces)
    assert told == call.function.arguments


def test_tool_results_go_back_into_the_conversation(client: OpenAI) -> None:
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"a": 1}'},
    }
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, tools=[WEATHER], max_tokens=3
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (openai.NotFoundError, {"model": "other"}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"max_tokens": 100_000}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"n": 10_000}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "long " * 2000}]}),
        (openai.BadRequestError, {"top_logprobs": 50, "logprobs": True}),
    ],
)
def test_errors_become_the_clients_exceptions(
    client: OpenAI, error: type[openai.APIStatusError], change: dict[str, object]
) -> None:
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 3, **change}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(error):
        client.chat.completions.create(**asked, stream=True)


def test_embeddings_are_refused_clearly(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="x")


def test_async_client_streams_many_at_once(server: Running) -> None:
    texts: dict[int, str] = {}

    async def talk(client: AsyncOpenAI, number: int) -> None:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"Number {number}"}],
            max_tokens=12,
            seed=number,
            stream=True,
        )
        async with stream:
            parts = [part.choices[0].delta.content or "" async for part in stream]
        texts[number] = "".join(parts)

    async def talk_all() -> None:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=LIMIT_S
        ) as client:
            async with asyncio.TaskGroup() as group:
                for number in range(32):
                    group.create_task(talk(client, number))
            together = dict(texts)
            for number in (0, 31):
                await talk(client, number)
                assert texts[number] == together[number]
            assert len(together) == 32

    # Under trio the client leaves its response's generator unfinished, and trio says so.
    asyncio.run(talk_all())
