"""`/v1/completions`: prompts of every kind in, OpenAI's text_completion objects out."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import trio

from aserve.actors.engine import Engine
from aserve.actors.validate import too_long
from aserve.api.body import aside
from aserve.api.call import Call
from aserve.api.chunks import Envelope, Frames, UsageTally, encode, usage_of
from aserve.api.generate import Job
from aserve.api.logprobs import CompletionLogprobs, TokenNames
from aserve.api.params import completion_params
from aserve.api.protocol import CompletionRequest
from aserve.api.service import Service
from aserve.core.message import TokenLogprob
from aserve.core.request import Delta, SamplingParams
from aserve.errors import RequestError

Tokens = Sequence[int]


async def prepare(service: Service, request: CompletionRequest, call: Call) -> Job:
    engine = service.check_model(request.model)
    params = await aside(partial(completion_params, request), call.body_len)
    if request.stream and params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs needs stream to be false.", param="prompt_logprobs")
    given = prompts_of(request.prompt, service.config.limits.prompts_max, engine.context_len)
    special = request.add_special_tokens is not False
    prompts = await service.prompts.texts(given, special=special)
    await trio.lowlevel.checkpoint()
    envelope = service.envelope(f"cmpl-{call.request_id}", "text_completion")
    include_usage = bool(request.stream_options and request.stream_options.include_usage)
    writer = (
        CompletionChunks(engine, params, prompts, Frames(envelope, include_usage=include_usage))
        if request.stream
        else CompletionAnswer(engine, params, prompts, envelope)
    )
    return Job(id=envelope.id, prompts=prompts, params=params, writer=writer)


def prompts_of(
    prompt: str | Sequence[Any], prompts_max: int, context_len: int
) -> Sequence[str | Tokens]:
    """A string, strings, token ids or lists of token ids; never a mixture. 400 otherwise.

    Lengths come first: millions of ids need not be looked at to be refused.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty.", param="prompt")
    if isinstance(prompt[0], int):
        if len(prompt) > context_len:
            raise too_long(len(prompt), None, context_len)
    elif len(prompt) > prompts_max:
        raise RequestError(
            f"prompt may have at most {prompts_max} entries, not {len(prompt)}.", param="prompt"
        )
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of lists of "
            "token ids; not a mixture.",
            param="prompt",
        )
    return [prompt] if kinds == {int} else prompt


class _Choices:
    """What both writers know: how a delta of (prompt, index) becomes a choice's fields."""

    def __init__(self, engine: Engine, params: SamplingParams, prompts: Sequence[Tokens]) -> None:
        self.names = TokenNames(engine.tokenizer)
        self.params = params
        self._prompts = prompts
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def place(self, prompt: int, index: int) -> int:
        """`index` of the choice in the response."""
        return prompt * self.params.n + index

    def logprobs(self, prompt: int, delta: Delta) -> dict[str, list[Any]] | None:
        """Of this delta's tokens; with `echo` the prompt's come before the first."""
        if self.params.logprobs is None:
            return None
        place = self.place(prompt, delta.index)
        writer = self._logprobs.get(place)
        tokens: tuple[int, ...] = ()
        found: tuple[TokenLogprob | None, ...] = ()
        if writer is None:
            skip = self.params.skip_special_tokens
            writer = self._logprobs[place] = CompletionLogprobs(self.names, skip_special=skip)
        if self.params.echo and delta.prompt_logprobs is not None:
            tokens = tuple(self._prompts[prompt])
            found = delta.prompt_logprobs
        return writer.part(tokens + delta.token_ids, found + delta.logprobs)


class CompletionChunks(_Choices):
    """Writes a stream."""

    def __init__(
        self, engine: Engine, params: SamplingParams, prompts: Sequence[Tokens], frames: Frames
    ) -> None:
        super().__init__(engine, params, prompts)
        self._frames = frames
        self._plain: dict[int, tuple[bytes, bytes]] = {}  # what is round the text of a choice

    def push(self, prompt: int, delta: Delta) -> bytes:
        reason = delta.finish_reason
        if reason is None and self.params.logprobs is None:
            return self._text(self.place(prompt, delta.index), delta.text)
        wants_logprobs = self.params.logprobs is not None and delta.token_ids
        if not (delta.text or reason or wants_logprobs):
            return b""
        logprobs = b"null"
        if wants_logprobs:
            logprobs = encode(self.logprobs(prompt, delta))
        return self._frames.chunk(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}'
            % (
                self.place(prompt, delta.index),
                encode(delta.text),
                logprobs,
                b'"%b"' % reason.encode() if reason else b"null",
            )
        )

    def _text(self, place: int, text: str) -> bytes:
        if not text:
            return b""
        around = self._plain.get(place)
        if around is None:
            plain = b'{"index":%d,"text":%%,"logprobs":null,"finish_reason":null}' % place
            around = self._plain[place] = self._frames.around(plain)
        return around[0] + encode(text) + around[1]

    def end(self, tally: UsageTally) -> bytes:
        return self._frames.usage(tally.prompts)


class CompletionAnswer(_Choices):
    """Collects one answer."""

    def __init__(
        self, engine: Engine, params: SamplingParams, prompts: Sequence[Tokens], envelope: Envelope
    ) -> None:
        super().__init__(engine, params, prompts)
        self._envelope = envelope
        self._choices: dict[int, dict[str, Any]] = {}

    def push(self, prompt: int, delta: Delta) -> bytes:
        place = self.place(prompt, delta.index)
        choice = self._choices.get(place)
        logprobs = self.logprobs(prompt, delta)
        if choice is None:
            choice = {"index": place, "text": [], "logprobs": logprobs, "finish_reason": None}
            self._choices[place] = choice
        elif logprobs is not None:
            for name, values in logprobs.items():
                choice["logprobs"][name].extend(values)
        choice["text"].append(delta.text)
        choice["finish_reason"] = delta.finish_reason
        if self.params.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.names.prompt(delta.prompt_logprobs)
        return b""

    def end(self, tally: UsageTally) -> bytes:
        choices = [
            {**choice, "text": "".join(choice["text"])}
            for _, choice in sorted(self._choices.items())
        ]
        answer = {"choices": choices, "usage": usage_of(tally.prompts)}
        return encode(self._envelope)[:-1] + b"," + encode(answer)[1:]
