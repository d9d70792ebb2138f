"""A Jinja environment for templates that strangers wrote: no escape, and no endless work.

Jinja's sandbox guards attributes; this adds a budget of steps, characters and seconds that loops,
calls, operators and filters draw on, so that `range(10**9)` or a doubling string ends in an error.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

STEPS_MAX = 1_000_000
CHARS_MAX = 256 << 20  # of every value a template makes, together
VALUE_LEN_MAX = 8 << 20  # characters of one value, nested ones included
ITEM_LEN = 16  # what an item of a list or mapping counts beside its characters
NUMBER_MAX = 1 << 16  # as an argument of a function or filter: widths, counts, indents
NUMBER_BITS_MAX = 1 << 16  # of a result; two such numbers are multiplied in microseconds

# Names a template cannot write, so it can neither call nor replace them.
_COUNTED, _JOINED = "counted by the sandbox", "joined by the sandbox"


class Exhausted(jinja2.TemplateError):
    """The template did too much."""


class Budget:
    """What one rendering may still do."""

    def __init__(self, seconds_max: float) -> None:
        self._steps_left = STEPS_MAX
        self._chars_left = CHARS_MAX
        self._until = time.monotonic() + seconds_max

    def step(self, chars: int = 0) -> None:
        self._steps_left -= 1
        self._chars_left -= chars
        if self._steps_left < 0 or self._chars_left < 0:
            raise Exhausted("the chat template does too much work")
        if self._steps_left % 64 == 0 and time.monotonic() > self._until:
            raise Exhausted("the chat template takes too long")

    def value(self, value: Any) -> Any:
        """`value`, paid for."""
        self.step(weight(value))
        return value

    def room(self, length: int) -> None:
        """Refuses a value of `length` characters before it is made."""
        if length > VALUE_LEN_MAX:
            raise Exhausted("the chat template makes a value that is too long")


budget_of_rendering: ContextVar[Budget] = ContextVar("budget_of_rendering")


def weight(value: Any) -> int:
    """Characters and items in `value`, as often as it appears; Exhausted if too many."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            total += ITEM_LEN * len(item)
            waiting.extend(item.values())
        elif isinstance(item, list | tuple):
            total += ITEM_LEN * len(item)
            waiting.extend(item)
        if total > VALUE_LEN_MAX:
            raise Exhausted("the chat template makes a value that is too long")
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment transformers gives chat templates, with a budget; one per template."""

    intercepted_binops = frozenset(["*", "+", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=lambda value: budget_of_rendering.get().value(value),
        )
        self.filters["tojson"] = _tojson
        for name in ("sum", "xmlattr", "urlize", "wordwrap", "pprint"):
            del self.filters[name]  # of no use here, and hard to bound
        for name, function in self.filters.items():
            self.filters[name] = _bounded(name, function)
        self.filters |= {_COUNTED: _counted, _JOINED: _joined}
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form[:256])
        del self.globals["lipsum"]
        self._called_len = 0  # constant text of all that can be called

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for called in template.find_all((nodes.Macro, nodes.CallBlock)):
            self._called_len += _constant_len(called)
        return _Instrument().visit(template)  # type: ignore[no-any-return]

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = budget_of_rendering.get()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and isinstance(value, str | bytes | list | tuple):
                    budget.room(weight(value) * times)
        elif operator == "**":
            _check_numbers((left, right * 1024))
        elif operator == "%" and isinstance(left, str):
            _check_text(left, "format", right if isinstance(right, tuple) else (right,))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > NUMBER_BITS_MAX:
            raise Exhausted("the chat template computes a number that is too large")
        return budget.value(result)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = budget_of_rendering.get()
        budget.step(self._called_len)
        # The sandbox wraps `str.format`, so look below.
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            _check_text(owner, function.__name__, (*args, *kwargs.values()))
        return budget.value(super().call(context, function, *args, **kwargs))


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Instrument(NodeTransformer):
    """Makes loops and `~` draw on the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not allowed", node.lineno)
        text_len = nodes.Const(_constant_len(node))
        node.iter = nodes.Filter(node.iter, _COUNTED, [text_len], [], None, None)
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node.nodes[0], _JOINED, node.nodes[1:], [], None, None)


def _constant_len(node: nodes.Node) -> int:
    return sum(len(text.data) for text in node.find_all(nodes.TemplateData))


def _counted(items: Iterable[Any], text_len: int) -> Iterator[Any]:
    """`items`, each paid for as one step and the constant text of the loop's body."""
    budget = budget_of_rendering.get()
    for item in items:
        budget.step(text_len)
        yield item


def _joined(*values: Any) -> str:
    """The `~` operator."""
    budget = budget_of_rendering.get()
    budget.value(values)
    return "".join(map(str, values))


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that pays for what it returns and takes no huge numbers."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name == "join":  # a generator would not tell its length
            args = (*args[:skipped], list(args[skipped]), *args[skipped + 1 :])
        given = (*args[skipped:], *kwargs.values())
        if name in _GROWS:
            text = given[0] if isinstance(given[0], str) else ""
            _check_text(text, name, given[1:] if text else given)
        else:
            _check_numbers(given)
        return budget_of_rendering.get().value(function(*args, **kwargs))

    for mark in ("jinja_pass_arg", "jinja_async_variant"):
        if hasattr(function, mark):
            setattr(bounded, mark, getattr(function, mark))
    return bounded


# Methods of strings and filters whose result can be longer than all that goes in.
_GROWS = {"format", "format_map", "replace", "join", "indent", "expandtabs", "tojson", "string"}
_WIDE = re.compile(r"\d{5}")  # a width or precision in a format string


def _check_numbers(given: Iterable[Any]) -> None:
    for value in given:
        if isinstance(value, int) and abs(value) > NUMBER_MAX:
            raise Exhausted("the chat template gives a function a number that is too large")


def _check_text(text: str, name: str, given: tuple[Any, ...]) -> None:
    """Refuses a call on `text` that could make very much of little."""
    _check_numbers(given)
    if name == "translate":
        raise Exhausted("the chat template uses str.translate, which is not allowed")
    if name not in _GROWS:
        return
    budget = budget_of_rendering.get()
    largest = max((v if isinstance(v, int) else weight(v) for v in given), default=0)
    if name == "replace":
        pattern = str(given[0]) if given else ""
        budget.room(text.count(pattern) * largest)
    elif name.startswith("format"):
        if _WIDE.search(text):
            raise Exhausted("the chat template formats a value too wide")
        budget.room((text.count("{") + text.count("%")) * largest)
    elif name == "join":
        texts = [len(value) for value in (text, *given) if isinstance(value, str)]
        counts = [len(value) for value in given if isinstance(value, list | tuple)]
        budget.room(max(texts, default=0) * max(counts, default=0))
    elif name in ("indent", "expandtabs"):
        budget.room((text.count("\n") + text.count("\t") + 1) * largest)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers: no HTML escapes, and text stays readable for the model."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=min(indent, 16) if isinstance(indent, int) else indent,
        separators=separators,
        sort_keys=sort_keys,
    )
