"""Chat messages in, the prompt a model was trained on out, by the model's own Jinja template."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2

from aserve.errors import RequestError
from aserve.text.sandbox import VALUE_LEN_MAX, Budget, Exhausted, Sandbox, budget_of_rendering

TEMPLATE_LEN_MAX = 1 << 20
SECONDS_MAX = 5.0

NO_TEMPLATE = (
    "this model has no chat template, so it takes plain prompts only (/v1/completions); "
    "give it one with --model.chat_template FILE, a file with a Jinja template"
)

Message = Mapping[str, Any]


class _Raised(jinja2.TemplateError):
    """The template called raise_exception: it does not take these messages."""


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
    quote: Callable[[Any], Any] = lambda value: value,
    **variables: Any,
) -> str:
    """The prompt text. `special_tokens` has `bos_token`, `eos_token`; `variables` are the client's.
    `quote` is applied to all that the client wrote: with `Tokenizer.quote` none of it can become a
    special token, so no message ends its turn and goes on as somebody else.

    Raises RequestError (400) if the template refuses the messages, fails on them or does too much,
    if content has parts other than text, or if there is no template.
    """
    if template is None:
        raise RequestError(NO_TEMPLATE, param="messages")
    compiled = _compiled(template)
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    try:  # after `_plain`, which joins the parts of a text
        plain, told, variables = quote(plain), quote(list(tools or ())), quote(variables)
    except RecursionError as error:
        raise RequestError("the messages are nested too deeply", param="messages") from error
    given = {
        "messages": plain,
        "tools": told or None,
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
        "bos_token": "",
        "eos_token": "",
        **(special_tokens or {}),
    }
    if taken := [name for name in variables if name in given and name != "documents"]:
        message = f"chat_template_kwargs may not set {', '.join(sorted(taken))}"
        raise RequestError(message, param="chat_template_kwargs")
    return _run(compiled, {**given, **variables})


def _run(compiled: jinja2.Template, variables: dict[str, Any]) -> str:
    token = budget_of_rendering.set(Budget(SECONDS_MAX))
    try:
        parts: list[str] = []
        length = 0
        for part in compiled.generate(variables):
            length += len(part)
            if length > VALUE_LEN_MAX:
                raise Exhausted("the chat template writes too much")
            parts.append(part)
        return "".join(parts)
    except _Raised as error:
        raise RequestError(str(error), param="messages") from error
    except Exhausted as error:
        raise RequestError(str(error), param="messages") from error
    except (jinja2.TemplateError, *_FAILURES) as error:
        message = f"the chat template failed on these messages: {error}"
        raise RequestError(message, param="messages") from error
    finally:
        budget_of_rendering.reset(token)


# What an expression can raise on values of the wrong type or size.
_FAILURES = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > TEMPLATE_LEN_MAX:
        raise RequestError("the chat template is too long", param="messages")
    sandbox = Sandbox()
    sandbox.globals["raise_exception"] = _raise_exception
    try:
        return sandbox.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        message = f"the model's chat template is not valid, line {error.lineno}: {error.message}"
        raise RequestError(message, param="messages") from error
    except (RecursionError, MemoryError) as error:
        raise RequestError("the chat template is nested too deeply", param="messages") from error


def _raise_exception(message: str) -> None:
    raise _Raised(message)


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: content is text, tool arguments are objects."""
    param = f"messages.{place}"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{param} needs a role", param=param)
    plain = dict(message)
    plain["content"] = _text(message.get("content"), f"{param}.content")
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_call(call, f"{param}.tool_calls") for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _text(content: Any, param: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(f"{param} must be a string or a list of parts", param=param)
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            said = f"a part of type {kind!r}" if isinstance(kind, str) else "a part without a type"
            raise RequestError(f"{param} has {said}; this model takes text only", param=param)
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{param} needs a function with a name", param=param)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            message = f"{param}: the arguments of {function['name']} are not JSON"
            raise RequestError(message, param=param) from error
    return {**call, "function": {**function, "arguments": arguments}}
