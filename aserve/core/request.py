"""What a client asks and what it gets back, before and after the planner speaks of sequences."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from aserve.core.message import Sampling, TokenLogprob

FinishReason = Literal["stop", "length", "abort", "error"]


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most one is set. `json` is a JSON schema (object or text), `grammar` is Lark."""

    json: dict | str | None = None  # type: ignore[type-arg]
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to generate. Names and defaults are vLLM's; `max_tokens=None` means up to the context.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 filter nothing. `seed=None` draws
    a fresh one. `logprobs=k` gives the chosen token's log-probability and k alternatives;
    `prompt_logprobs=k` the same for the prompt; `echo` puts the prompt's text before the output.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = {}
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutput | None = None


class Request(msgspec.Struct, frozen=True):
    """One choice of one client request, as the planner sees it. Lower `priority` goes first."""

    seq: int
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    priority: int = 0
    cache_salt: str = ""


class Output(msgspec.Struct, frozen=True):
    """What one report meant for one sequence. `cached_len` prompt tokens came from the cache.

    `stop_token` is the stop id that ended it; it is also the last of `tokens`.
    """

    seq: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_token: int | None
    cached_len: int
    error: str | None = None

    @property
    def n_steps(self) -> int:
        """Of the model, that drew `tokens`: one, however many drafts were accepted with it."""
        return int(bool(self.tokens))


class Usage(msgspec.Struct, frozen=True):
    """`target_steps` are the steps of the model in which the completion was drawn: one a token
    without speculative decoding, fewer with it. The first is the one that ended the prompt.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    target_steps: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Delta(msgspec.Struct, frozen=True):
    """New text and tokens of choice `index`; all deltas of a choice joined are its one-shot text.

    `text` may lag behind `token_ids` (a split character, a possible stop string). `finish_reason`
    and `usage` (of this choice) are set on the choice's last delta. `stop_reason` is the stop
    string or stop token id that ended it. `prompt_logprobs` (first delta only) has None for token
    0.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
