"""Structured output: which tokens may come next under a JSON schema, regex, choice or grammar.

Built on llguidance rather than xgrammar: it computes masks lazily, so a grammar costs milliseconds
to start and nothing is precomputed over the vocabulary; regexes are matched by derivatives, so none
is catastrophic; and its fuel limits bound time and memory of the start and of each step.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from aserve.core.config import Limits
from aserve.core.message import Grammar
from aserve.core.request import StructuredOutput
from aserve.errors import RequestError
from aserve.text.repeats import repeats

Words = npt.NDArray[np.uint32]

PARAM = "structured_outputs"
# Beyond it a text that could be split among the copies in many ways runs out of fuel half-way, and
# a single count costs a second; nothing sensible is near.
REPEATS_MAX = 100_000
LARK_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
LARK_REGEX = re.compile(r"/((?:\\.|[^/\\\n])+)/")


class Source(Protocol):
    """What is needed of a text.Tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> Sequence[int]: ...

    def __hash__(self) -> int: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...

    def encode(self, text: str, add_special: bool, *, parse_special: bool) -> list[int]: ...


def check(structured: StructuredOutput, limits: Limits) -> Grammar:
    """The constraint in its one spelling.

    Raises RequestError (400) if it is too large, too deep, not valid, or asks for what cannot be
    enforced. Takes milliseconds.
    """
    kind, text = _spelled(structured, limits)
    if len(text.encode(errors="replace")) > limits.grammar_bytes_max:
        message = f"{kind} is longer than {limits.grammar_bytes_max} bytes"
        raise RequestError(message, param=PARAM)
    grammar = Grammar(kind=kind, text=text)
    most = max(map(repeats, _regexes(grammar)), default=1)
    if most > REPEATS_MAX:
        message = f"{kind} repeats a part {most} times, nested counts multiplied; at most "
        raise RequestError(f"{message}{REPEATS_MAX}", param=PARAM)
    try:
        failed, said = llguidance.LLMatcher.validate_grammar_with_warnings(
            _source(grammar), None, limits=_limits()
        )
    except ValueError as error:  # a lone surrogate, which is no text
        raise RequestError(f"{kind} is not valid: {error}", param=PARAM) from error
    if failed:
        raise RequestError(f"{kind} is not valid: {_first(said[0])}", param=PARAM)
    return grammar


def compile(grammar: Grammar, tokenizer: Source, vocab: int) -> "GrammarMatcher":
    """A matcher at the start of a text; `vocab` is the model's, which may exceed the tokenizer's.

    The first call for a tokenizer builds its token trie (about 0.4 s), the first for a grammar its
    lexer and first mask: call it off the event loop. Raises RequestError (400).
    """
    matcher = _prototype(grammar, _environment(tokenizer, vocab))
    return GrammarMatcher(matcher.deep_copy(), vocab)


class GrammarMatcher:
    """How far one text has got under its grammar. Any step may fail for good: see `error`.

    A matcher for a text that is part written (after a retraction) is a new one that accepted the
    written tokens.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._word_count = (vocab + 31) // 32

    @property
    def error(self) -> str | None:
        """Why the text cannot go on, if it cannot."""
        return _first(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def is_stopped(self) -> bool:
        """Nothing but an end-of-text token may follow."""
        return self._matcher.is_stopped()

    @property
    def is_accepting(self) -> bool:
        """The text is whole as it is; an end-of-text token is allowed."""
        return self._matcher.is_accepting()

    def mask(self) -> Words | None:
        """Bit `id % 32` of word `id // 32` says that `id` may come next; None on an error."""
        if self._matcher.is_error():
            return None
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        if self._matcher.is_error():
            return None
        words = np.zeros(self._word_count, dtype=np.uint32)
        shared = min(len(mask), len(words))
        words[:shared] = mask[:shared]
        return words

    def accept(self, token: int) -> bool:
        """Goes on by a token; False, for good, if it is not allowed."""
        return self._matcher.consume_token(token)

    def accept_all(self, tokens: Sequence[int]) -> bool:
        return all(self.accept(token) for token in tokens)


class _Vocabulary:
    """A tokenizer as llguidance's TokenizerWrapper wants it.

    llguidance's own reading of tokenizer.json takes every token that looks like `<name>` for a
    special one and then refuses it where a grammar wants that very text. Here a token is special
    only if the tokenizer says so, and text is never split into special tokens.
    """

    def __init__(self, tokenizer: Source, vocab: int) -> None:
        count = max(vocab, tokenizer.vocab_size)
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [token for token in ids if tokenizer.is_special(token)]
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.tokens += [b""] * (count - len(self.tokens))
        for token in self.special_token_ids:
            self.tokens[token] = b"<special %d>" % token
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)
        self.bos_token_id = None
        self._tokenizer = tokenizer
        longest_first = sorted(set(self.tokens) - {b""}, key=len, reverse=True)
        self._longest = len(longest_first[0])
        special = set(self.special_token_ids)
        self._id_of = {b: n for n, b in enumerate(self.tokens) if b and n not in special}

    def __call__(self, text: bytes) -> list[int]:
        """Ids whose bytes are `text`: as the model was trained to see it, if that is possible."""
        try:
            ids = self._tokenizer.encode(text.decode(), False, parse_special=False)
        except UnicodeDecodeError:
            return self._greedy(text)
        spelled = b"".join(self.tokens[token] for token in ids)
        # A sentencepiece tokenizer puts a space in front.
        return ids if spelled == text else self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._id_of), None)
            if end is None:
                return ids
            ids.append(self._id_of[text[at:end]])
            at = end
        return ids


@lru_cache(maxsize=8)
def _environment(tokenizer: Source, vocab: int) -> llguidance.LLTokenizer:
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab))
    return llguidance.LLTokenizer(wrapper, eos_token=list(tokenizer.eos_ids) or None)


@lru_cache(maxsize=256)
def _prototype(grammar: Grammar, environment: llguidance.LLTokenizer) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(environment, _source(grammar), log_level=0, limits=_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error() or matcher.stop_reason() not in ("NotStopped", "NoExtension"):
        why = _first(matcher.get_error()) or "no text satisfies it"
        if why.startswith("NoExtension"):
            why = "it allows no text at all (it may refer to itself without adding anything)"
        raise RequestError(f"{grammar.kind} cannot be followed: {why}", param=PARAM)
    return matcher


def _spelled(structured: StructuredOutput, limits: Limits) -> tuple[str, str]:
    kinds = (
        structured.json is not None,
        structured.json_object,
        structured.regex is not None,
        bool(structured.choice),
        structured.grammar is not None,
    )
    if sum(kinds) != 1:
        raise RequestError("exactly one kind of structured output must be set", param=PARAM)
    if structured.json is not None:
        return "json_schema", _schema(structured.json, limits.grammar_depth_max)
    if structured.regex is not None:
        return "regex", structured.regex
    if structured.choice:
        return "choice", json.dumps(structured.choice, ensure_ascii=False)
    return ("json_object", "") if structured.grammar is None else ("grammar", structured.grammar)


def _schema(schema: Any, depth_max: int) -> str:
    """The schema as compact JSON text; a string is parsed first."""
    too_deep = f"the JSON schema is nested deeper than {depth_max}"
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError as error:
        raise RequestError(too_deep, param=PARAM) from error
    except (ValueError, TypeError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}", param=PARAM) from error
    if not isinstance(value, dict):
        raise RequestError("a JSON schema is an object", param=PARAM)
    if _depth(value) > depth_max:
        raise RequestError(too_deep, param=PARAM)
    return text


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        nested = [item for item in level if isinstance(item, dict | list)]
        level = [
            part for item in nested for part in (item.values() if isinstance(item, dict) else item)
        ]
    return depth


def _regexes(grammar: Grammar) -> Iterator[str]:
    """Regular expressions in it: what a lexer would have to unroll the counts of."""
    if grammar.kind == "regex":
        yield grammar.text
    elif grammar.kind == "grammar":
        yield from LARK_REGEX.findall(LARK_STRING.sub("", grammar.text))
    elif grammar.kind == "json_schema":
        waiting: list[Any] = [json.loads(grammar.text)]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                if isinstance(pattern := value.get("pattern"), str):
                    yield pattern
                if isinstance(patterns := value.get("patternProperties"), dict):
                    yield from patterns
                waiting.extend(value.values())
            elif isinstance(value, list):
                waiting.extend(value)


def _source(grammar: Grammar) -> str:
    """As llguidance takes it."""
    matcher = llguidance.LLMatcher
    if grammar.kind == "json_object":
        return matcher.grammar_from_json_schema('{"type":"object"}')
    if grammar.kind == "json_schema":
        return matcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        # Python's and JSON's `\\d` differ; clients mean the ASCII digits.
        regex = llguidance.regex_to_lark(grammar.text, "d")
        return matcher.grammar_from_lark(f"start: /{regex}/")
    if grammar.kind == "choice":
        # One terminal, not one rule: alternatives of a terminal share their states.
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.text)]
        return matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(choices))
    assert grammar.kind == "grammar", grammar.kind
    return matcher.grammar_from_lark(grammar.text)


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _first(message: str) -> str:
    """llguidance's words without its dump of the state, bounded."""
    text = message.split("<state>")[0].split("<non-verbose/>")[0].strip()
    return text if len(text) <= 500 else text[:500] + "..."
