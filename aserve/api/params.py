"""Request fields to SamplingParams: names, defaults and the things this server refuses clearly."""

from collections.abc import Mapping
from typing import Any

from aserve.api.protocol import ChatRequest, CompletionRequest, Generate, ResponseFormat
from aserve.core.config import Limits
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.errors import RequestError

SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "bad_words", "stop", "stop_token_ids", "include_stop_str_in_output"),
    *("ignore_eos", "skip_special_tokens", "prompt_logprobs"),
)
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


def completion_params(request: CompletionRequest) -> SamplingParams:
    """For `/v1/completions`; ranges are checked by the engine."""
    _refuse_unsupported(request)
    count = 1 if request.n is None else request.n
    if request.best_of is not None and request.best_of != count:
        raise RequestError(
            f"best_of is {request.best_of} but n is {count}; this server returns every sequence "
            "it samples, so they must be equal.",
            param="best_of",
        )
    if request.suffix:
        raise RequestError("suffix is not supported: no infilling models.", param="suffix")
    fields = _same(request)
    fields["max_tokens"] = _or(request.max_tokens, COMPLETION_TOKENS)
    fields["logprobs"] = request.logprobs
    fields["echo"] = bool(request.echo)
    return SamplingParams(**fields, structured_outputs=structured_of(request))


def chat_params(
    request: ChatRequest, limits: Limits, forced: StructuredOutput | None
) -> SamplingParams:
    """For `/v1/chat/completions`; `forced` is the constraint that `tool_choice` asks for."""
    _refuse_unsupported(request)
    if request.functions:
        raise RequestError("functions is deprecated; use tools.", param="functions")
    if request.modalities and request.modalities != ["text"]:
        raise RequestError("modalities: this model writes text only.", param="modalities")
    fields = _same(request)
    fields["max_tokens"] = _or(request.max_completion_tokens, request.max_tokens)
    fields["logprobs"] = _chat_logprobs(request, limits)
    structured = structured_of(request)
    if structured is not None and forced is not None:
        raise RequestError(
            "tool_choice asks for a tool call, so the answer cannot follow another format too.",
            param="tool_choice",
        )
    return SamplingParams(**fields, structured_outputs=structured or forced)


def _or(value: int | None, default: int | None) -> int | None:
    return default if value is None else value


def _same(request: Generate) -> dict[str, Any]:
    values = ((name, getattr(request, name)) for name in SAME_NAMES)
    return {name: value for name, value in values if value is not None}


def _chat_logprobs(request: ChatRequest, limits: Limits) -> int | None:
    top = request.top_logprobs
    if top is None:
        return 0 if request.logprobs else None
    if not 0 <= top <= limits.logprobs_max:
        raise RequestError(
            f"top_logprobs must be in [0, {limits.logprobs_max}], not {top}", param="top_logprobs"
        )
    if not request.logprobs:
        if top == 0:
            return None
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return top


def _refuse_unsupported(request: Generate) -> None:
    if request.use_beam_search:
        raise RequestError("Beam search is not supported.", param="use_beam_search")
    if request.truncate_prompt_tokens is not None:
        raise RequestError(
            "truncate_prompt_tokens is not supported; shorten the prompt.",
            param="truncate_prompt_tokens",
        )
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true.", param="stream_options")


def structured_of(request: Generate) -> StructuredOutput | None:
    """The one constraint asked for, in whichever of the three spellings. 400 for two of them."""
    wanted: dict[str, tuple[str, object]] = {}
    if request.response_format is not None:
        wanted |= _of_format(request.response_format)
    if request.structured_outputs is not None:
        given = request.structured_outputs
        for name in ("json", "regex", "choice", "grammar"):
            wanted[f"structured_outputs.{name}"] = name, getattr(given, name)
        wanted["structured_outputs.json_object"] = "json_object", given.json_object or None
    for name in ("json", "regex", "choice", "grammar"):
        wanted[f"guided_{name}"] = name, getattr(request, f"guided_{name}")
    set_ones = {param: pair for param, pair in wanted.items() if pair[1] is not None}
    if not set_ones:
        return None
    if len(set_ones) > 1:
        raise RequestError(
            f"Only one format can be asked for, not {' and '.join(set_ones)}.",
            param=next(iter(set_ones)),
        )
    ((param, (name, value)),) = set_ones.items()
    if name == "choice" and isinstance(value, list):
        if not value:
            raise RequestError(f"{param} must not be empty.", param=param)
        value = tuple(value)
    return StructuredOutput(**{name: value})  # type: ignore[arg-type]


def _of_format(given: ResponseFormat) -> Mapping[str, tuple[str, object]]:
    param = "response_format"
    if given.type == "text":
        return {}
    if given.type == "json_object":
        return {param: ("json_object", True)}
    if given.json_schema is None or given.json_schema.schema is None:
        raise RequestError(
            "response_format of type json_schema needs json_schema.schema.",
            param="response_format.json_schema",
        )
    schema = given.json_schema.schema
    if schema is False:
        raise RequestError(
            "The schema false allows no answer at all.", param="response_format.json_schema.schema"
        )
    return {param: ("json", {} if schema is True else schema)}
