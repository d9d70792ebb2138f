"""Structured output: what masks allow, what is refused, and that nothing hostile costs much."""

import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from aserve.core.config import Limits
from aserve.core.message import Grammar
from aserve.core.request import StructuredOutput
from aserve.errors import RequestError
from aserve.testing.tiny import tiny_tokenizer
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer
from aserve.text.tools import CallPiece, ToolParser, forced_call

LIMITS = Limits()
VOCAB = 400  # the model's, larger than the tokenizer's 384


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), eos_ids=(2,))


def matcher(tokenizer: Tokenizer, **structured: Any) -> grammar.GrammarMatcher:
    checked = grammar.check(StructuredOutput(**structured), LIMITS)
    return grammar.compile(checked, tokenizer, VOCAB)


def allowed(one: grammar.GrammarMatcher) -> list[int]:
    mask = one.mask()
    assert mask is not None
    assert mask.dtype == np.uint32
    assert mask.shape == ((VOCAB + 31) // 32,)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def written(one: grammar.GrammarMatcher, tokenizer: Tokenizer, seed: int) -> str:
    """Text of random allowed tokens, up to the end of text, which is taken when it may be."""
    generator = np.random.default_rng(seed)
    ids: list[int] = []
    while len(ids) < 300:
        choices = allowed(one)
        if one.is_accepting:
            assert 2 in choices
            break
        assert 2 not in choices
        ids.append(int(generator.choice(choices)))
        assert one.accept(ids[-1])
    return tokenizer.decode(ids)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bo", "Zoë"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(8))
def test_a_json_schema_is_followed(tokenizer: Tokenizer, seed: int) -> None:
    # White space could go on for ever under random choices.
    schema = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    value = json.loads(written(matcher(tokenizer, json=schema), tokenizer, seed))
    assert value["name"] in ("Ann", "Bo", "Zoë")
    assert 0 <= value["age"] <= 150
    assert set(value) <= {"name", "age", "tags"}


@pytest.mark.parametrize("seed", range(8))
def test_regex_and_choice_are_followed(tokenizer: Tokenizer, seed: int) -> None:
    date = r"^(19|20)\d{2}-[01]\d$"
    assert re.fullmatch(date, written(matcher(tokenizer, regex=date), tokenizer, seed))
    choices = ("yes", "no", "日本", 'with "quotes"\n')
    assert written(matcher(tokenizer, choice=choices), tokenizer, seed) in choices
    lark = 'start: "<" NAME ">"\nNAME: /[a-z]{1,3}/'
    assert re.fullmatch("<[a-z]{1,3}>", written(matcher(tokenizer, grammar=lark), tokenizer, seed))


def test_json_object_takes_any_object_and_only_objects(tokenizer: Tokenizer) -> None:
    for text, good in [('{"a": [1, {"b": null}]}', True), ("[1]", False), ("{'a': 1}", False)]:
        one = matcher(tokenizer, json_object=True)
        accepted = one.accept_all(tokenizer.encode(text))
        assert (accepted and one.is_accepting) == good


def test_many_choices_are_no_trouble(tokenizer: Tokenizer) -> None:
    choices = tuple(f"choice {n}" for n in range(3000))
    one = matcher(tokenizer, choice=choices)
    assert one.accept_all(tokenizer.encode("choice 2999"))
    assert one.is_stopped


def test_the_end_is_allowed_once_the_text_is_whole(tokenizer: Tokenizer) -> None:
    [a] = tokenizer.encode("a")
    one = matcher(tokenizer, regex="a{1,2}")
    assert 2 not in allowed(one)
    assert one.accept(a)
    assert set(allowed(one)) >= {2, a}
    assert not one.is_stopped
    assert one.accept(a)
    assert allowed(one) == [2]
    assert one.is_stopped
    assert one.accept(2)  # ignore_eos: the end, again and again
    assert allowed(one) == [2]
    assert one.error is None


def test_a_wrong_token_is_an_error_for_good(tokenizer: Tokenizer) -> None:
    one = matcher(tokenizer, regex="a+")
    assert not one.accept_all(tokenizer.encode("b"))
    assert one.mask() is None
    assert one.error
    assert "<" not in one.error
    # Others of the same grammar know nothing of it.
    assert matcher(tokenizer, regex="a+").error is None


def test_replay_brings_a_new_matcher_to_the_same_place(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode('{"name": "Zoë", "ag')
    one = matcher(tokenizer, json=SCHEMA)
    for count, token in enumerate(ids):
        again = matcher(tokenizer, json=SCHEMA)
        assert again.accept_all(ids[:count])
        assert allowed(again) == allowed(one)
        assert one.accept(token)


def test_ids_beyond_the_tokenizer_are_never_allowed(tokenizer: Tokenizer) -> None:
    one = matcher(tokenizer, regex=r"(?s).*")
    assert max(allowed(one)) < tokenizer.vocab_size


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({"regex": "("}, "(?s)regex is not valid: .*unclosed"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "\ud800"}, "not valid"),
        ({"regex": "a" * 70_000}, "longer than 65536 bytes"),
        ({"regex": "(" * 5000 + ")" * 5000}, "not valid"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[1]"}, "is an object"),
        ({"json": {"type": "nothing"}}, "Invalid type: nothing"),
        ({"json": {"$ref": "#/nowhere"}}, "does not exist"),
        ({"json": {"$ref": "http://localhost/x.json"}}, "http://localhost"),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
        ({"json": {"enum": [float("nan")]}}, "not JSON"),
        ({"json": {"enum": [object()]}}, "not JSON"),
        ({"json": '{"a":' * 100_000}, "not JSON|deeper"),
        ({"json": '{"items":' * 70 + "{}" + "}" * 70}, "deeper than 64"),
        ({"regex": "(a{1,1000}){1,1000}"}, "repeats a part 1000000 times.* at most 100000"),
        ({"regex": "((a{1,50}){1,50}){1,50}"}, "repeats a part 125000 times"),
        ({"regex": "a{1000000}"}, "repeats a part"),
        ({"json": {"items": {"pattern": "^(a{999}){999}$"}}}, "repeats a part"),
        ({"json": {"patternProperties": {"(a{999}){999}": {}}}}, "repeats a part"),
        ({"grammar": 'start: "/" /(a{999}){999}/ "/"'}, "repeats a part"),
        ({"grammar": "start: x"}, "grammar is not valid"),
        ({"grammar": "start: " + "(" * 9000}, "not valid"),
    ],
)
def test_what_cannot_be_enforced_is_refused(structured: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        grammar.check(StructuredOutput(**structured), LIMITS)
    assert caught.value.status == 400
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "structured",
    [
        {"regex": r"([a-z]{1,63}\.){1,200}"},
        {"regex": "a{1,100000}"},
        {"json": {"properties": {"pattern": {"const": "a{999999}"}}}},
        {"grammar": 'start: "/(a{999}){999}/"'},
    ],
)
def test_counts_that_are_modest_or_no_counts_are_taken(structured: dict[str, Any]) -> None:
    grammar.check(StructuredOutput(**structured), LIMITS)


def test_depth_is_not_counted_in_strings() -> None:
    schema = {"type": "object", "description": "[" * 500, "properties": {"a": {"const": "{" * 99}}}
    assert grammar.check(StructuredOutput(json=schema), LIMITS).kind == "json_schema"


def test_a_grammar_of_no_text_is_refused_on_compiling(tokenizer: Tokenizer) -> None:
    endless = Grammar("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}')
    with pytest.raises(RequestError, match="cannot be followed: it allows no text at all"):
        grammar.compile(endless, tokenizer, VOCAB)


DOUBLING = "".join(f"A{n}: A{n + 1} A{n + 1}\n" for n in range(40)) + 'A40: "x"'
HOSTILE = [
    ("regex", "(a{1,1000}){1,1000}"),
    ("regex", "((.{1,100}.){1,100}x){1,100}"),
    ("regex", "(a+)+(a*)*b"),
    ("regex", "(.*a.{50}|.*b.{60}|.*c.{70})*"),
    ("regex", "(?:x?){5000}x{5000}"),
    ("grammar", 'start: s\ns: s s | "a" | ""\n'),
    ("grammar", "start: a0\n" + DOUBLING.replace("A", "a")),
    ("grammar", "start: A0\n" + DOUBLING),
    ("json_schema", '{"type":"array","minItems":100000000,"items":{}}'),
    (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{x}{n}": {"type": "string"}}} for x in "ab"]}
                    for n in range(20)
                ]
            }
        ),
    ),
]

PROBE = """
import json, resource, sys, time
from aserve.core.message import Grammar
from aserve.errors import RequestError
from aserve.testing.tiny import tiny_tokenizer
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer

tokenizer = Tokenizer(tiny_tokenizer(), eos_ids=(2,))
grammar.compile(Grammar("regex", "a"), tokenizer, 400)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for kind, text in json.loads(sys.argv[1]):
    start = time.process_time()
    steps = 0
    try:
        one = grammar.compile(Grammar(kind, text), tokenizer, 400)
        for steps in range(40):
            if one.mask() is None or one.is_stopped:
                break
            one.accept_all(tokenizer.encode("a"))
    except RequestError:
        pass
    print(json.dumps([kind, text[:40], steps, time.process_time() - start]))
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024))
"""


@pytest.mark.slow
def test_hostile_grammars_cost_little_time_and_memory() -> None:
    """In a process of its own, so that one that runs away is only a failure."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(HOSTILE)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    *told, grown_mib = map(json.loads, done.stdout.splitlines())
    assert len(told) == len(HOSTILE)
    for kind, text, _, seconds in told:
        assert seconds < 5, (kind, text)
    assert grown_mib < 600


# Forced tool calls, which are grammars too.

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
                "required": ["city"],
                "additionalProperties": False,
                "$defs": {"city": {"enum": ["Paris", "Łódź"]}},
                "x-guidance": {"whitespace_flexible": False},
            },
        },
    },
    {"type": "function", "function": {"name": 'say "é"', "parameters": {"const": {}}}},
]


@pytest.mark.parametrize("name", ["get_weather", None])
@pytest.mark.parametrize("seed", range(4))
def test_a_forced_call_is_one_that_parses(
    tokenizer: Tokenizer, name: str | None, seed: int
) -> None:
    forced = forced_call(TOOLS, name)
    assert forced.grammar is not None
    text = written(matcher(tokenizer, grammar=forced.grammar), tokenizer, seed)
    pieces = ToolParser(lambda: "call_1").push(text)
    assert pieces
    assert all(isinstance(piece, CallPiece) for piece in pieces)
    told, arguments = pieces[0], pieces[1]
    assert isinstance(told, CallPiece)
    assert isinstance(arguments, CallPiece)
    assert told.name == name if name else told.name in ("get_weather", 'say "é"')
    if told.name == "get_weather":
        assert json.loads(arguments.arguments)["city"] in ("Paris", "Łódź")


def test_a_required_call_may_be_several_and_a_named_one_is_one(tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call>'
    for name, again in (("get_weather", False), (None, True)):
        forced = forced_call(TOOLS, name)
        one = matcher(tokenizer, grammar=forced.grammar)
        assert one.accept_all(tokenizer.encode(call))
        assert one.is_accepting
        assert one.accept_all(tokenizer.encode("\n" + call)) == again
