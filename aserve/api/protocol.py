"""What clients may send: OpenAI's fields and vLLM's extras, with strict types.

Fields nobody here knows are ignored, as OpenAI-compatible servers do, so that clients with vendor
extras keep working; a known field with a wrong type is refused. Ranges are the engine's to check.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Json = dict[str, Any]


class Struct(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A JSON object of a request."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class JsonSchema(Struct):
    name: str | None = None
    schema: Json | bool | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Structured(Struct):
    """vLLM's `structured_outputs`; at most one of them."""

    json: Json | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Generate(Struct):
    """What both kinds of completion share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, float] | None = None
    bad_words: list[str] | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: Int | None = None
    prompt_logprobs: Int | None = None
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Structured | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: Int | None = None
    # Accepted and without effect here, as a client may send them by default.
    user: str | None = None


class CompletionRequest(Generate, kw_only=True):
    """`/v1/completions`: https://platform.openai.com/docs/api-reference/completions/create."""

    prompt: str | list[str | TokenId | list[TokenId]]
    best_of: Int | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


class Part(Struct):
    type: str
    text: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str | Json = ""


class ToolCall(Struct):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Struct):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    name: str


class NamedChoice(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class ChatRequest(Generate, kw_only=True):
    """`/v1/chat/completions`: https://platform.openai.com/docs/api-reference/chat/create."""

    messages: list[Message]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(Struct):
    """vLLM's `/tokenize`: a prompt or chat messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct):
    tokens: list[TokenId]
    model: str | None = None


class AbortRequest(Struct):
    request_id: str


FIELDS: dict[type[Generate], frozenset[str]] = {
    kind: frozenset(field.encode_name for field in msgspec.structs.fields(kind))
    for kind in (CompletionRequest, ChatRequest)
}
completion_decoder = msgspec.json.Decoder(CompletionRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)
tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
abort_decoder = msgspec.json.Decoder(AbortRequest)
