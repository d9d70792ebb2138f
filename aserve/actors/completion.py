"""The whole answer to one request, put together from its deltas."""

from collections.abc import AsyncIterable

import msgspec

from aserve.core.message import TokenLogprob
from aserve.core.request import Delta, FinishReason, SamplingParams, Usage


class CompletionChoice(msgspec.Struct, frozen=True):
    """One of `n` answers. `logprobs` (one a token) is None unless asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    usage: Usage
    error: str | None


class Completion(msgspec.Struct, frozen=True):
    """Every choice, and choice 0 under its own names. `usage` counts the prompt once."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionChoice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        return self.choices[0].prompt_logprobs

    @property
    def error(self) -> str | None:
        return next((choice.error for choice in self.choices if choice.error), None)

    @property
    def usage(self) -> Usage:
        return Usage(
            len(self.prompt_token_ids),
            sum(choice.usage.completion_tokens for choice in self.choices),
            self.choices[0].usage.cached_tokens,
            sum(choice.usage.target_steps for choice in self.choices),
        )


async def collect(
    deltas: AsyncIterable[Delta], prompt_token_ids: tuple[int, ...], params: SamplingParams
) -> Completion:
    """Read `deltas` to their end."""
    found: list[list[Delta]] = [[] for _ in range(params.n)]
    async for delta in deltas:
        found[delta.index].append(delta)
    wanted = params.logprobs is not None
    return Completion(prompt_token_ids, tuple(_choice(parts, wanted) for parts in found))


def _choice(parts: list[Delta], wants_logprobs: bool) -> CompletionChoice:
    first, last = parts[0], parts[-1]
    assert last.finish_reason is not None
    assert last.usage is not None
    logprobs = tuple(entry for part in parts for entry in part.logprobs)
    return CompletionChoice(
        index=last.index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs if wants_logprobs else None,
        prompt_logprobs=first.prompt_logprobs,
        usage=last.usage,
        error=last.error,
    )
