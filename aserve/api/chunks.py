"""Server-sent events of bytes encoded once per request; a chunk adds only what is new."""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

from aserve.core.message import GRAMMAR_FAULT, NONE_LEFT
from aserve.core.request import Usage
from aserve.errors import RequestError

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def fingerprint_of(version: str, model: str) -> str:
    """`system_fingerprint`: changes when an equal seed may give another text."""
    return "fp_" + hashlib.sha256(f"{version}\0{model}".encode()).hexdigest()[:12]


class Envelope(msgspec.Struct, frozen=True):
    """What every chunk and answer of one request has in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Frames:
    """Writes chunks of one request; `include_usage` puts `usage: null` into all but the last."""

    def __init__(self, envelope: Envelope, *, include_usage: bool) -> None:
        self.include_usage = include_usage
        self._head = b"data: " + encode(envelope)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        """`choice`: the JSON of the one entry in `choices`."""
        return self._head + choice + self._tail

    def around(self, choice: bytes) -> tuple[bytes, bytes]:
        """What stands before and behind the only `%` in every chunk of such a choice."""
        before, _, behind = choice.partition(b"%")
        return self._head + before, behind + self._tail

    def usage(self, usages: Iterable[Usage]) -> bytes:
        """The last chunk, without choices; nothing unless the client asked for it."""
        if not self.include_usage:
            return b""
        return self._head + b'],"usage":' + encode(usage_of(usages)) + b"}\n\n"


def usage_of(usages: Iterable[Usage]) -> dict[str, Any]:
    """The `usage` object: the sum over prompts."""
    prompt = completion = cached = steps = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
        steps += usage.target_steps
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "target_steps": steps,
    }


class UsageTally:
    """Adds up choices: a prompt counts once however many choices share it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}

    def add(self, prompt: int, usage: Usage) -> None:
        before = self._prompts.get(prompt)
        if before is not None:
            usage = Usage(
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=before.completion_tokens + usage.completion_tokens,
                # The first choice's hit; later choices always hit what the first has computed.
                cached_tokens=min(before.cached_tokens, usage.cached_tokens),
                target_steps=before.target_steps + usage.target_steps,
            )
        self._prompts[prompt] = usage

    @property
    def prompts(self) -> Iterable[Usage]:
        return self._prompts.values()

    @property
    def prompt_tokens(self) -> int:
        return sum(usage.prompt_tokens for usage in self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        return sum(usage.completion_tokens for usage in self._prompts.values())


def failure_of(reason: str, error: str | None) -> RequestError | None:
    """The error behind a finish reason that OpenAI's schema has no word for."""
    if reason == "abort":
        return RequestError("The request was aborted.", status=400, code="request_aborted")
    if reason == "error" and error is not None and error.startswith(GRAMMAR_FAULT):
        # Only drawing shows that a regex or schema needs more states than a step may make.
        return RequestError(error, status=400, param="structured_outputs", code="grammar_failed")
    if reason == "error" and error == NONE_LEFT:
        return RequestError(error, status=400, code="nothing_to_draw")
    if reason == "error":
        return RequestError(error or "The engine failed.", status=500, code="engine_error")
    return None
