"""Chat messages and tools as a chat template wants them: plain dicts with text content."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from aserve.api.protocol import Message, Part, Tool, ToolCall
from aserve.errors import RequestError

TOOL_PROMPT = """\
You may call functions. Their signatures, as JSON, one a line:
<tools>
{tools}
</tools>
To call one, answer with a JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(tool) for tool in tools or ()]


def check_count(messages: Sequence[Message], messages_max: int) -> None:
    """400 for more messages than a template is asked to write."""
    if len(messages) > messages_max:
        raise RequestError(
            f"messages may have at most {messages_max} entries, not {len(messages)}.",
            param="messages",
        )


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises RequestError(400) that names the message at fault."""
    if not messages:
        raise RequestError("messages must not be empty.", param="messages")
    return [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    # `developer` is OpenAI's newer name for `system`, which templates do not know.
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls:
        if role != "assistant":
            raise RequestError(
                f"{where}: only an assistant message has tool_calls.", param=f"{where}.tool_calls"
            )
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _content(message: Message, where: str) -> str:
    param = f"{where}.content"
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise RequestError(f"{param}: a {message.role} message needs content.", param=param)
    if isinstance(message.content, str):
        return message.content
    return "".join(
        _part_text(part, f"{param}[{place}]") for place, part in enumerate(message.content)
    )


def _part_text(part: Part, param: str) -> str:
    if part.type != "text":
        raise RequestError(
            f"{param}: content of type {part.type[:100]!r} is not supported; this model reads text "
            "only.",
            param=param,
        )
    if part.text is None:
        raise RequestError(f"{param}: a part of type text needs text.", param=param)
    return part.text


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Arguments become an object, which templates write as JSON; other text is refused later."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed: object = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError):
            parsed = arguments
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    plain: dict[str, Any] = {"type": "function", "function": function}
    return plain if call.id is None else {"id": call.id, **plain}


def teach_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """For a template that ignores tools: tools in a system message, calls and answers as text."""
    taught = [_as_text(message) for message in messages]
    if not tools:
        return taught
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    prompt = TOOL_PROMPT.format(tools=lines)
    if taught[0]["role"] == "system":
        first = {**taught[0], "content": f"{taught[0]['content']}\n\n{prompt}"}
        return [first, *taught[1:]]
    return [{"role": "system", "content": prompt}, *taught]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] in ("tool", "function"):
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    if calls := message.get("tool_calls"):
        lines = [
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in calls
        ]
        content = [message["content"]] if message["content"] else []
        return {"role": "assistant", "content": "\n".join([*content, *lines])}
    return message
