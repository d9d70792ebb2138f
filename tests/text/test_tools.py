"""Tool calls out of streamed text, and the grammar that forces one."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import RequestError
from aserve.text.tools import (
    CallPiece,
    Content,
    ForcedParser,
    ToolParser,
    forced_call,
    parse_call,
)


def parse(
    chunks: list[str], kind: type[ToolParser] | type[ForcedParser] = ToolParser
) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call; checks the order of the pieces."""
    ids = itertools.count()
    parser = kind(lambda: f"call_{next(ids)}")
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)] + parser.flush()
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                assert (piece.index, piece.id) == (len(calls), f"call_{len(calls)}")
                calls.append([piece.name, ""])
            assert piece.index == len(calls) - 1
            calls[-1][1] += piece.arguments
    return content, [(name, arguments) for name, arguments in calls]


def cut(text: str, borders: list[int]) -> list[str]:
    at = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


def call(name: str, arguments: object) -> str:
    told = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{told}\n</tool_call>"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("</tool_call>"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=4), json_values, max_size=3)
blocks = st.one_of(
    st.builds(call, st.sampled_from(["get", "wetter-é"]), objects),
    st.sampled_from(
        [
            "<tool_call>",
            "</tool_call>",
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            '{"name": "f", "arguments": {}}',
        ]
    ),
    st.text(alphabet='<tool_cal>/ \n"\\{}x', max_size=12),
)
texts = st.lists(blocks, max_size=5).map("".join)


@given(texts, st.lists(st.integers(0, 400), max_size=12))
def test_chunks_do_not_matter(text: str, borders: list[int]) -> None:
    assert parse(cut(text, borders)) == parse([text]) == parse(list(text))


@given(texts)
def test_nothing_is_lost(text: str) -> None:
    """Content is the text without some of its calls and white space around them."""
    content, calls = parse([text])
    length = sum(len(arguments) for _, arguments in calls)
    assert len(content) + length <= len(text)
    if not calls:
        assert content == text
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)
        assert arguments in text or arguments == "{}"


@given(st.lists(objects, min_size=1, max_size=3), st.sampled_from(["", "\n", " \n "]))
def test_calls_come_out_as_they_were_written(arguments: list[dict], gap: str) -> None:
    text = "Let me see." + gap + gap.join(call(f"f{n}", a) for n, a in enumerate(arguments)) + gap
    content, calls = parse(list(text))
    assert content == "Let me see."
    assert [name for name, _ in calls] == [f"f{n}" for n in range(len(arguments))]
    assert [json.loads(told) for _, told in calls] == arguments


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", []),
        ("ends < in a tag's <tool_ca", "ends < in a tag's <tool_ca", []),
        (call("f", {"a": 1}) + "\n\nDone. ", "\n\nDone. ", [("f", '{"a": 1}')]),
        # The closing tag was the end of the text, or never came.
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('x <tool_call>{"name": "f", "argu', 'x <tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
        ("<tool_call>f(x)</tool_call> so", "<tool_call>f(x)</tool_call> so", []),
        # The model's own spelling of numbers and spaces stays.
        (
            '<tool_call>{"arguments":{"x":1.50, "y" : 1e2},"name":"f"}</tool_call>',
            "",
            [("f", '{"x":1.50, "y" : 1e2}')],
        ),
    ],
)
def test_cases(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parse([text]) == (content, calls)


def test_content_is_told_as_it_comes_and_a_call_once_it_is_whole() -> None:
    parser = ToolParser(lambda: "call_1")
    assert parser.push("Hm, ") == [Content("Hm,")]
    assert parser.push("well <too") == [Content(" well")]
    assert parser.push('l_call>{"name": "f", "arguments": {}}</tool') == []
    assert parser.push("_call>") == [
        CallPiece(0, id="call_1", name="f"),
        CallPiece(0, arguments="{}"),
    ]


def test_deeply_nested_arguments_are_content_and_no_crash() -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 100_000 + "</tool_call>"
    assert parse([text]) == (text, [])
    assert parse_call("[" * 100_000) is None


def test_forcing_a_tool_that_is_not_there_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(RequestError, match="'g'"):
        forced_call([tool], "g")
    with pytest.raises(RequestError, match="none in tools"):
        forced_call([])
    with pytest.raises(RequestError, match="name"):
        forced_call([{"type": "function"}])


def forced_text(names: list[str], arguments: list[dict]) -> str:
    """As `forced_call`'s grammar writes it."""
    return "\n".join(map(call, names, arguments))


forced_calls = st.lists(
    st.tuples(st.sampled_from(["get", "wetter-é", 'a"b', "back\\slash"]), objects), min_size=1
)


@given(forced_calls, st.lists(st.integers(0, 400), max_size=12))
def test_forced_calls_are_the_same_in_any_chunks(
    calls: list[tuple[str, dict]], borders: list[int]
) -> None:
    text = forced_text([name for name, _ in calls], [arguments for _, arguments in calls])
    content, found = parse(cut(text, borders), ForcedParser)
    assert content == ""
    assert [(name, json.loads(told)) for name, told in found] == calls
    assert parse(list(text), ForcedParser) == (content, found)


@given(forced_calls, st.integers(0, 10**6))
def test_a_forced_call_cut_short_is_a_call_cut_short(
    calls: list[tuple[str, dict]], length: int
) -> None:
    text = forced_text([name for name, _ in calls], [arguments for _, arguments in calls])
    _, whole = parse([text], ForcedParser)
    content, found = parse([text[: length % (len(text) + 1)]], ForcedParser)
    assert content == ""
    assert found[:-1] == whole[: max(0, len(found) - 1)]
    for (name, told), (name_whole, told_whole) in zip(found, whole, strict=False):
        assert name == name_whole
        assert told_whole.startswith(told)


def test_the_arguments_of_a_forced_call_are_told_as_they_come() -> None:
    parser = ForcedParser(lambda: "call_1")
    assert parser.push('<tool_call>\n{"name": "f", "argum') == []
    assert parser.push('ents": ') == [CallPiece(0, id="call_1", name="f")]
    assert parser.push('{"a": "}') == [CallPiece(0, arguments='{"a": "}')]
    assert parser.push('"}}\n</tool') == [CallPiece(0, arguments='"}')]
    assert parser.push("_call>") == []
    assert parser.flush() == []


def test_forcing_a_tool_whose_parameters_are_no_object_is_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    with pytest.raises(RequestError, match="type object, not 'string'"):
        forced_call([tool])
