"""Tool calls in the Hermes/Qwen format, out of streamed text, and a grammar that forces one.

The model writes `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, once per call.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from aserve.core.request import StructuredOutput
from aserve.errors import RequestError
from aserve.text.reasoning import held_len

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_WHITE = " \t\n\r"


class Content(msgspec.Struct, frozen=True):
    """Text of the answer itself."""

    text: str


class CallPiece(msgspec.Struct, frozen=True):
    """Part of call `index`: first a piece with `id` and `name`, then pieces of `arguments`.

    A call's `arguments` joined are the model's own JSON text of an object.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolParser:
    """Splits streamed text into content and calls; any chunking gives the same content and calls.

    A call is told only once its JSON is whole and well formed, because what was sent to a client
    cannot be taken back; text in the tags that is no such call stays content, tags and all. White
    space next to a call is not content. `new_id` makes call ids.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._held = ""  # white space, then perhaps a tag and what follows it
        self._scan = _Scan()
        self._call_count = 0
        self._after_call = False  # no content since the last call

    def push(self, text: str) -> list[Content | CallPiece]:
        self._held += text
        pieces: list[Content | CallPiece] = []
        while self._inside() or self._find_open(pieces):
            if not self._find_close(pieces):
                break
        return pieces

    def flush(self) -> list[Content | CallPiece]:
        """What is left: a call whose closing tag never came, or content."""
        held, self._held = self._held, ""
        pieces: list[Content | CallPiece] = []
        inside, self._scan = self._scan.open_len, _Scan()
        if inside and (call := parse_call(held[inside:])):
            self._tell(call, pieces)
        elif held and not (self._after_call and not held.strip(_WHITE)):
            pieces.append(Content(held))
        return pieces

    def _inside(self) -> bool:
        return self._scan.open_len > 0

    def _find_open(self, pieces: list[Content | CallPiece]) -> bool:
        at = self._held.find(OPEN)
        found = at >= 0
        end = at if found else len(self._held) - held_len(self._held, OPEN)
        safe = self._held[:end].rstrip(_WHITE)
        if safe:
            pieces.append(Content(safe))
            self._after_call = False
            self._held = self._held[len(safe) :]
        if found:
            self._scan = _Scan(open_len=at - len(safe) + len(OPEN))
        return found

    def _find_close(self, pieces: list[Content | CallPiece]) -> bool:
        """Whether the block ended, as a call or as content."""
        end = self._scan.close(self._held)
        if end < 0:
            return False
        call = parse_call(self._held[self._scan.open_len : end - len(CLOSE)])
        if call:
            self._tell(call, pieces)
        else:
            pieces.append(Content(self._held[:end]))
            self._after_call = False
        self._held = self._held[end:]
        self._scan = _Scan()
        return True

    def _tell(self, call: tuple[str, str], pieces: list[Content | CallPiece]) -> None:
        index = self._call_count
        self._call_count += 1
        self._after_call = True
        pieces.append(CallPiece(index, id=self._new_id(), name=call[0]))
        pieces.append(CallPiece(index, arguments=call[1]))


class _Scan:
    """Looks for the closing tag outside of JSON strings, each character once.

    `open_len` characters precede the JSON; 0 means no block is open.
    """

    def __init__(self, open_len: int = 0) -> None:
        self.open_len = open_len
        self._at = open_len
        self._quoted = False

    def close(self, text: str) -> int:
        """Index after the closing tag, or -1 while it is not there."""
        while self._at < len(text):
            char = text[self._at]
            if self._quoted and char == "\\":
                if self._at + 1 == len(text):
                    return -1
                self._at += 1
            elif char == '"':
                self._quoted = not self._quoted
            elif char == "<" and not self._quoted:
                if text.startswith(CLOSE, self._at):
                    return self._at + len(CLOSE)
                if CLOSE.startswith(text[self._at :]):
                    return -1
            self._at += 1
        return -1


class ForcedParser:
    """Splits text that follows `forced_call`'s grammar; any chunking gives the same calls.

    The grammar has promised a call and its JSON, so the name is told once it is there and the
    arguments as they come; where the text is cut short, so are they. What precedes a name is never
    content.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._held = ""
        self._call_count = 0
        self._arguments: _ObjectEnd | None = None

    def push(self, text: str) -> list[Content | CallPiece]:
        self._held += text
        pieces: list[Content | CallPiece] = []
        while self._arguments is not None or self._find_name(pieces):
            if not self._take_arguments(pieces):
                break
        return pieces

    def flush(self) -> list[Content | CallPiece]:
        return []

    def _find_name(self, pieces: list[Content | CallPiece]) -> bool:
        found = FORCED_HEAD.match(self._held)
        if found is None:
            return False
        name = json.loads(found["name"])
        pieces.append(CallPiece(self._call_count, id=self._new_id(), name=name))
        self._call_count += 1
        self._held = self._held[found.end() :]
        self._arguments = _ObjectEnd()
        return True

    def _take_arguments(self, pieces: list[Content | CallPiece]) -> bool:
        """Whether they are complete."""
        assert self._arguments is not None
        length = self._arguments.find(self._held)
        told = self._held if length < 0 else self._held[:length]
        if told:
            pieces.append(CallPiece(self._call_count - 1, arguments=told))
        self._held = self._held[len(told) :]
        if length >= 0:
            self._arguments = None
        return length >= 0


class _ObjectEnd:
    """Looks for the end of a valid JSON object that comes in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def find(self, part: str) -> int:
        """Length of what belongs to the object, or -1 if all of `part` does and more is to come."""
        for at, char in enumerate(part):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return -1


def parse_call(text: str) -> tuple[str, str] | None:
    """(name, JSON text of the arguments) of a whole call, or None if it is not one.

    The arguments keep the model's own spelling. A call without arguments gets `{}`.
    """
    try:
        call = _members(text)
    except (ValueError, RecursionError):
        return None
    if call is None:
        return None
    name, arguments = call.get("name"), call.get("arguments", ({}, "{}"))
    if name is None or not isinstance(name[0], str) or not name[0]:
        return None
    return (name[0], arguments[1]) if isinstance(arguments[0], dict) else None


def _members(text: str) -> dict[str, tuple[Any, str]] | None:
    """Value and spelling of each member of the JSON object `text`; None or ValueError if none."""
    at = _skip(text, 0)
    if not text.startswith("{", at):
        return None
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(text, at + 1)
    if text.startswith("}", at):
        return members if _skip(text, at + 1) == len(text) else None
    while True:
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            return None
        start = _skip(text, at + 1)
        value, at = _DECODER.raw_decode(text, start)
        members[key] = value, text[start:at]
        at = _skip(text, at)
        if text.startswith("}", at):
            return members if _skip(text, at + 1) == len(text) else None
        if not text.startswith(",", at):
            return None
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _WHITE:
        at += 1
    return at


def forced_call(tools: Sequence[Mapping[str, Any]], name: str | None = None) -> StructuredOutput:
    """A grammar under which the answer is one call of tool `name`, or of one or more of any.

    For `tool_choice` "required" and named. `tools` are OpenAI's `{"type": "function", "function":
    {"name", "parameters"}}`. Raises RequestError if `name` is not among them or there are none.
    """
    functions = [_function(tool) for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
    if not functions:
        wanted = "a tool" if name is None else f"the tool {name!r}"
        message = f"tool_choice asks for {wanted}, but there is none in tools"
        raise RequestError(message, param="tool_choice")
    calls = "call" if name is not None else r'call ("\n" call)*'
    rules = [f"start: {calls}", "call: " + " | ".join(f"call_{n}" for n in range(len(functions)))]
    for n, function in enumerate(functions):
        head, tail = f'{OPEN}\n{{"name": {_quote(function["name"])}, "arguments": ', f"}}\n{CLOSE}"
        rules.append(f"call_{n}: {_quote(head)} arguments_{n} {_quote(tail)}")
        # A rule of its own keeps `$ref: "#/..."` inside the tool's own schema.
        rules.append(f"arguments_{n}: %json {json.dumps(_parameters(function))}")
    return StructuredOutput(grammar="\n".join(rules) + "\n")


FORCED_HEAD = re.compile(
    rf'(?:\}}\n{CLOSE}\n)?{OPEN}\n\{{"name": (?P<name>"(?:[^"\\]|\\.)*"), "arguments": '
)


def _quote(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError("each of tools needs a function with a name", param="tools")
    return function


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters") or {"type": "object"}
    if not isinstance(parameters, Mapping):
        raise RequestError("parameters of a tool must be a JSON schema object", param="tools")
    if parameters.get("type", "object") != "object":
        message = f"parameters of a tool must be of type object, not {parameters['type']!r:.100}"
        raise RequestError(message, param="tools")
    return {"type": "object", **parameters}
