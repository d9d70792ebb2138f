"""`/v1/chat/completions`: messages in, OpenAI's chat.completion(.chunk) objects out."""

import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal, cast

import msgspec

from aserve.actors.engine import Engine
from aserve.api.body import aside
from aserve.api.call import Call
from aserve.api.chunks import Envelope, Frames, UsageTally, encode, usage_of
from aserve.api.generate import Job
from aserve.api.logprobs import TokenNames
from aserve.api.messages import check_count, plain_tools
from aserve.api.params import chat_params
from aserve.api.prompts import Chat
from aserve.api.protocol import ChatRequest, NamedChoice
from aserve.api.service import Service
from aserve.core.config import Config
from aserve.core.request import Delta, SamplingParams, StructuredOutput
from aserve.errors import RequestError
from aserve.text.reasoning import ReasoningParser, Where, starts_where, wants_reasoning
from aserve.text.tools import CallPiece, Content, ForcedParser, ToolParser, forced_call

TAIL_LEN = 8  # tokens of the prompt that show whether it ends inside a thinking block


class Reasoning(msgspec.Struct, frozen=True):
    """Text of a thinking block."""

    text: str


Piece = Content | CallPiece | Reasoning


class Reading(msgspec.Struct, frozen=True):
    """How the text of this request's choices is to be read."""

    tools: bool = False
    forced: bool = False  # a grammar makes the answer a call
    calls_max: int | None = None
    reasoning: Where | None = None
    shows_reasoning: bool = True

    @property
    def plain(self) -> bool:
        return not self.tools and self.reasoning is None


class Reader:
    """Splits one choice's text into reasoning, content and tool calls."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        parser = ForcedParser if reading.forced else ToolParser
        self._tools = parser(_call_id) if reading.tools else None
        where = reading.reasoning
        self._reasoning = None if where is None else ReasoningParser(where)
        self.called = False

    def read(self, text: str, *, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        self._split(text, pieces)
        if last:
            if self._reasoning is not None:
                self._take(*self._reasoning.flush(), pieces)
            if self._tools is not None:
                pieces.extend(self._tools.flush())
        return [piece for piece in pieces if self._kept(piece)]

    def _split(self, text: str, pieces: list[Piece]) -> None:
        if self._reasoning is not None:
            self._take(*self._reasoning.push(text), pieces)
        else:
            self._take("", text, pieces)

    def _take(self, reasoning: str, content: str, pieces: list[Piece]) -> None:
        if reasoning and self._reading.shows_reasoning:
            pieces.append(Reasoning(reasoning))
        if content and self._tools is not None:
            pieces.extend(self._tools.push(content))
        elif content:
            pieces.append(Content(content))

    def _kept(self, piece: Piece) -> bool:
        if not isinstance(piece, CallPiece):
            return True
        self.called = True
        return self._reading.calls_max is None or piece.index < self._reading.calls_max


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


async def prepare(service: Service, request: ChatRequest, call: Call) -> Job:
    engine = service.check_model(request.model)
    check_count(request.messages, service.config.limits.messages_max)
    params, chat = await aside(partial(_understood, request, service.config), call.body_len)
    prompt = await service.prompts.chat(chat, call.body_len)
    reading = _reading(request, engine, service.config, prompt)
    last = chat.messages[-1]
    echoed = last["content"] if request.echo and last["role"] == "assistant" else ""
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    kind = "chat.completion.chunk" if request.stream else "chat.completion"
    envelope = service.envelope(f"chatcmpl-{call.request_id}", kind)
    choices = _Choices(engine, reading, echoed=echoed, logprobs=params.logprobs is not None)
    writer = (
        ChatChunks(choices, Frames(envelope, include_usage=include_usage))
        if request.stream
        else ChatAnswer(choices, envelope)
    )
    return Job(id=envelope.id, prompts=[prompt], params=params, writer=writer)


def _understood(request: ChatRequest, config: Config) -> tuple[SamplingParams, Chat]:
    if request.chat_template is not None:
        raise RequestError("A request may not bring its own chat template.", param="chat_template")
    params = chat_params(request, config.limits, _forced(request, config))
    if request.stream and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs needs stream to be false.", param="prompt_logprobs")
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    chat = Chat(
        request.messages,
        None if request.tool_choice == "none" else request.tools,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        template_kwargs=kwargs,
    )
    return params, chat


def _forced(request: ChatRequest, config: Config) -> StructuredOutput | None:
    """The constraint that makes the model call a tool, if `tool_choice` wants that."""
    choice = request.tool_choice
    if choice is None or choice == "none":
        return None
    if not request.tools:
        raise RequestError("tool_choice needs tools.", param="tool_choice")
    if config.model.tool_parser == "none":
        raise RequestError(
            "Tool calls are switched off on this server (model.tool_parser).", param="tools"
        )
    if choice == "auto":
        return None
    name = choice.function.name if isinstance(choice, NamedChoice) else None
    return forced_call(plain_tools(request.tools), name)


def _reading(
    request: ChatRequest, engine: Engine, config: Config, prompt: Sequence[int]
) -> Reading:
    template = engine.tokenizer.chat_template
    parser = config.model.reasoning_parser
    thinks = parser != "none" and (parser != "auto" or wants_reasoning(template))
    tools = bool(request.tools) and request.tool_choice != "none"
    where: Where | None = None
    forced = tools and request.tool_choice not in (None, "auto")
    if thinks and not forced:
        where = starts_where(engine.tokenizer.decode(list(prompt[-TAIL_LEN:])))
    return Reading(
        tools=tools and config.model.tool_parser != "none",
        forced=forced,
        calls_max=1 if request.parallel_tool_calls is False else None,
        reasoning=where,
        shows_reasoning=request.include_reasoning is not False,
    )


class _Choices:
    """What both writers know of the choices."""

    def __init__(self, engine: Engine, reading: Reading, *, echoed: str, logprobs: bool) -> None:
        self.names = TokenNames(engine.tokenizer)
        self.reading = reading
        self.echoed = echoed
        self.logprobs = logprobs
        self._readers: dict[int, Reader] = {}

    def reader(self, index: int) -> Reader | None:
        """The reader of choice `index`; None if this is its first delta."""
        return self._readers.get(index)

    def new_reader(self, index: int) -> Reader:
        reader = self._readers[index] = Reader(self.reading)
        return reader


FinishReason = Literal["stop", "length", "tool_calls"]


def finish_reason_of(reason: str, reader: Reader) -> FinishReason:
    """A choice that ended by itself after calling tools waits for their results."""
    if reason == "stop" and reader.called:
        return "tool_calls"
    return cast(FinishReason, reason)


class ChatChunks:
    """Writes a stream."""

    def __init__(self, choices: _Choices, frames: Frames) -> None:
        self._choices = choices
        self._frames = frames
        self._fast = choices.reading.plain and not choices.logprobs
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # what is round the text of a choice

    def push(self, _prompt: int, delta: Delta) -> bytes:
        choices, index = self._choices, delta.index
        reader = choices.reader(index)
        parts: list[bytes] = []
        if reader is None:
            reader = choices.new_reader(index)
            first = {"role": "assistant", "content": choices.echoed}
            parts.append(self._chunk(index, encode(first)))
            plain = b'{"index":%d,"delta":{"content":%%},"logprobs":null,"finish_reason":null}'
            self._plain[index] = self._frames.around(plain % index)
        elif self._fast and delta.finish_reason is None:
            return self._text(index, delta.text)
        if not self._fast:
            parts.extend(self._read(reader, delta))
        elif delta.text:
            parts.append(self._text(index, delta.text))
        if delta.finish_reason is not None:
            reason = finish_reason_of(delta.finish_reason, reader)
            parts.append(self._chunk(index, b"{}", finish=b'"%b"' % reason.encode()))
        return b"".join(parts)

    def _text(self, index: int, text: str) -> bytes:
        if not text:
            return b""
        before, behind = self._plain[index]
        return before + encode(text) + behind

    def _chunk(
        self, index: int, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null"
    ) -> bytes:
        return self._frames.chunk(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}'
            % (index, delta, logprobs, finish)
        )

    def _read(self, reader: Reader, delta: Delta) -> Iterable[bytes]:
        pieces = reader.read(delta.text, last=delta.finish_reason is not None)
        deltas = [encode(delta_of(piece)) for piece in pieces]
        logprobs = b"null"
        if self._choices.logprobs and delta.logprobs:
            entries = self._choices.names.chat(delta.logprobs)
            logprobs = encode({"content": entries, "refusal": None})
            deltas = deltas or [b'{"content":""}']
        for place, body in enumerate(deltas):
            # A token's text may be held back or split in two; its log-probability goes but once.
            yield self._chunk(delta.index, body, b"null" if place else logprobs)

    def end(self, tally: UsageTally) -> bytes:
        return self._frames.usage(tally.prompts)


def delta_of(piece: Piece) -> dict[str, Any]:
    """OpenAI's ChoiceDelta (with `reasoning_content`, as the common servers spell it)."""
    if isinstance(piece, Content):
        return {"content": piece.text}
    if isinstance(piece, Reasoning):
        return {"reasoning_content": piece.text}
    function: dict[str, str] = {"arguments": piece.arguments}
    if piece.name is None:
        return {"tool_calls": [{"index": piece.index, "function": function}]}
    function = {"name": piece.name, **function}
    call = {"index": piece.index, "id": piece.id, "type": "function", "function": function}
    return {"tool_calls": [call]}


class ChatAnswer:
    """Collects one answer."""

    def __init__(self, choices: _Choices, envelope: Envelope) -> None:
        self._choices = choices
        self._envelope = envelope
        self._pieces: dict[int, list[Piece]] = {}
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        self._reasons: dict[int, FinishReason] = {}
        self._prompt_logprobs: list[Any] | None = None

    def push(self, _prompt: int, delta: Delta) -> bytes:
        index = delta.index
        reader = self._choices.reader(index)
        if reader is None:
            reader = self._choices.new_reader(index)
            self._pieces[index] = [Content(self._choices.echoed)]
            self._logprobs[index] = []
        pieces = reader.read(delta.text, last=delta.finish_reason is not None)
        self._pieces[index].extend(pieces)
        if self._choices.logprobs:
            self._logprobs[index].extend(self._choices.names.chat(delta.logprobs))
        if delta.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = self._choices.names.prompt(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            self._reasons[index] = finish_reason_of(delta.finish_reason, reader)
        return b""

    def end(self, tally: UsageTally) -> bytes:
        answer: dict[str, Any] = {
            "choices": [self._choice(index) for index in sorted(self._pieces)],
            "usage": usage_of(tally.prompts),
        }
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        return encode(self._envelope)[:-1] + b"," + encode(answer)[1:]

    def _choice(self, index: int) -> dict[str, Any]:
        entries = {"content": self._logprobs[index], "refusal": None}
        return {
            "index": index,
            "message": message_of(self._pieces[index]),
            "logprobs": entries if self._choices.logprobs else None,
            "finish_reason": self._reasons[index],
        }


def message_of(pieces: Sequence[Piece]) -> dict[str, Any]:
    """OpenAI's ChatCompletionMessage; content is null only beside tool calls."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    calls: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            continue
        call = calls.setdefault(
            piece.index,
            {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}},
        )
        call["function"]["arguments"] += piece.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = list(calls.values())
    return message
