"""What a client may ask of the sampler: every type and range a row, before anything runs."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from aserve.core.config import Limits
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.errors import RequestError


class Facts(msgspec.Struct, frozen=True):
    """What the model and the configuration allow."""

    context_len: int
    vocab_size: int
    limits: Limits


class Number(msgspec.Struct, frozen=True):
    """One row: `kind`, and the interval (`low_open`: without its lower end)."""

    name: str
    kind: type
    low: float
    high: float
    optional: bool = False
    low_open: bool = False

    def check(self, value: object) -> None:
        if value is None and self.optional:
            return
        kinds = (int,) if self.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            word = "an integer" if self.kind is int else "a number"
            raise refused(self.name, f"must be {word}, not {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):  # a long int is no float at all
            raise refused(self.name, "must be finite")
        below = value <= self.low if self.low_open else value < self.low
        if below or value > self.high:
            bracket = "(" if self.low_open else "["
            shown = (str(end) if self.kind is int else f"{end:g}" for end in (self.low, self.high))
            interval = f"{bracket}{', '.join(shown)}]"
            raise refused(self.name, f"must be in {interval}, not {_shown(value)}")


TOKENS_MAX = 2**31 - 1
SHOWN_MAX = 10**20
SALT_LEN_MAX = 256

NUMBERS = (
    Number("max_tokens", int, 1, TOKENS_MAX, optional=True),
    Number("min_tokens", int, 0, TOKENS_MAX),
    Number("temperature", float, 0.0, 100.0),
    Number("top_k", int, -1, TOKENS_MAX),
    Number("top_p", float, 0.0, 1.0, low_open=True),
    Number("min_p", float, 0.0, 1.0),
    Number("presence_penalty", float, -2.0, 2.0),
    Number("frequency_penalty", float, -2.0, 2.0),
    Number("repetition_penalty", float, 0.0, 100.0, low_open=True),
    Number("seed", int, -(2**63), 2**63 - 1, optional=True),
)

FLAGS = ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")


def refused(param: str, message: str) -> RequestError:
    return RequestError(f"{param} {message}", param=param)


def _shown(value: float) -> str:
    """In a message: Python refuses to write out integers of thousands of digits."""
    return str(value) if abs(value) < SHOWN_MAX else "a number far beyond"


def check_params(params: SamplingParams, facts: Facts) -> None:
    """Raises RequestError (400) that names the offending `param`."""
    if not isinstance(params, SamplingParams):
        raise refused("params", "must be SamplingParams")
    limits = facts.limits
    for row in (
        *NUMBERS,
        Number("n", int, 1, limits.n_max),
        Number("logprobs", int, 0, limits.logprobs_max, optional=True),
        Number("prompt_logprobs", int, 0, limits.logprobs_max, optional=True),
    ):
        row.check(getattr(params, row.name))
    for name in FLAGS:
        if not isinstance(getattr(params, name), bool):
            raise refused(name, "must be true or false")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise refused("min_tokens", f"must be at most max_tokens ({params.max_tokens})")
    _check_texts("stop", stop_strings(params), limits.stop_max, limits.stop_len_max)
    _check_texts("bad_words", params.bad_words, limits.bad_words_max, limits.stop_len_max)
    _check_stop_ids(params.stop_token_ids, facts)
    _check_bias(params.logit_bias, facts)
    structured = params.structured_outputs
    if structured is not None and not isinstance(structured, StructuredOutput):
        raise refused("structured_outputs", "must be a StructuredOutput")


def stop_strings(params: SamplingParams) -> Sequence[str]:
    return (params.stop,) if isinstance(params.stop, str) else params.stop


def _check_list(name: str, values: object, count_max: int) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise refused(name, "must be a list")
    if len(values) > count_max:
        raise refused(name, f"may have at most {count_max} entries, not {len(values)}")


def _check_texts(name: str, texts: Sequence[str], count_max: int, len_max: int) -> None:
    _check_list(name, texts, count_max)
    for text in texts:
        if not isinstance(text, str):
            raise refused(name, f"must hold strings, not {type(text).__name__}")
        if not text:
            raise refused(name, "must not hold an empty string")
        if len(text) > len_max:
            raise refused(name, f"strings may have at most {len_max} characters")


def _check_id(name: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise refused(name, f"must hold token ids, not {type(token).__name__}")
    if not 0 <= token < vocab_size:
        what = f"holds token id {_shown(token)}, beyond the vocabulary of {vocab_size}"
        raise refused(name, what)


def _check_stop_ids(tokens: Sequence[int], facts: Facts) -> None:
    _check_list("stop_token_ids", tokens, facts.limits.bad_words_max)
    for token in tokens:
        _check_id("stop_token_ids", token, facts.vocab_size)


def _check_bias(bias: Mapping[int, float], facts: Facts) -> None:
    name = "logit_bias"
    if not isinstance(bias, Mapping):
        raise refused(name, "must map token ids to numbers")
    if len(bias) > facts.limits.logit_bias_max:
        raise refused(name, f"may have at most {facts.limits.logit_bias_max} entries")
    row = Number(name, float, -100.0, 100.0)
    for token, value in bias.items():
        _check_id(name, token, facts.vocab_size)
        row.check(value)


def check_prompt(tokens: Sequence[int], params: SamplingParams, facts: Facts) -> int:
    """How many tokens may be generated. Raises RequestError: empty, foreign or too long."""
    if not tokens:
        raise refused("prompt", "must not be empty")
    for token in tokens:
        _check_id("prompt", token, facts.vocab_size)
    room = facts.context_len - len(tokens)
    wanted = params.max_tokens
    if room < max(1, wanted or 1, params.min_tokens):
        raise too_long(len(tokens), wanted, facts.context_len)
    return room if wanted is None else wanted


def too_long(prompt_len: int, wanted: int | None, context_len: int) -> RequestError:
    asked = f"{prompt_len} in the prompt" + (f", {wanted} to generate" if wanted else "")
    return RequestError(
        f"This model's maximum context length is {context_len} tokens. However, you requested "
        f"{prompt_len + (wanted or 1)} tokens ({asked}). Please shorten the prompt or max_tokens.",
        param="prompt" if prompt_len >= context_len else "max_tokens",
        code="context_length_exceeded",
    )


def check_priority(priority: object) -> int:
    row = Number("priority", int, -(2**31), 2**31 - 1)
    row.check(priority)
    assert isinstance(priority, int)
    return priority


def check_salt(salt: object) -> str:
    if not isinstance(salt, str):
        raise refused("cache_salt", f"must be a string, not {type(salt).__name__}")
    if len(salt) > SALT_LEN_MAX:
        raise refused("cache_salt", f"may have at most {SALT_LEN_MAX} characters")
    return salt
