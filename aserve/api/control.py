"""The routes around generation: models, tokenizer, health, aborting, and what is refused."""

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import aserve
from aserve.actors.engine import Engine
from aserve.api.body import aside, read_json
from aserve.api.logprobs import TokenNames
from aserve.api.messages import check_count
from aserve.api.prompts import Chat
from aserve.api.protocol import abort_decoder, detokenize_decoder, tokenize_decoder
from aserve.api.service import Service
from aserve.errors import RequestError

T = TypeVar("T")


def answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class Control:
    """Handlers bound to one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, _request: Request) -> Response:
        """Alive: also while the model loads or ranks are restarted, which a new process would not
        hasten; not once they have failed for good, which only a new process can cure."""
        failure = self._service.failure
        if failure is not None:
            return answer({"status": "failed", "reason": failure}, 503)
        return answer({"status": "alive"})

    async def ready(self, _request: Request) -> Response:
        """Whether requests sent here now would be answered soon, and if not, why."""
        service = self._service
        if service.ready:
            return answer({"status": "ready"})
        status, reason = service.unready()
        response = answer({"status": status, "reason": reason}, 503)
        response.headers["retry-after"] = "1"
        return response

    async def debug_state(self, _request: Request) -> Response:
        """What `aserve doctor` shows."""
        return answer(await self._service.engine.debug_state())

    async def version(self, _request: Request) -> Response:
        return answer({"version": aserve.__version__})

    async def models(self, _request: Request) -> Response:
        return answer({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._service.check_model(request.path_params["model_id"])
        return answer(self._model())

    def _model(self) -> dict[str, object]:
        engine = self._service.engine
        return {
            "id": engine.model_name,
            "object": "model",
            "created": engine.created,
            "owned_by": "aserve",
            "max_model_len": engine.context_len,
        }

    async def _decode(self, request: Request, decoder: "msgspec.json.Decoder[T]") -> tuple[T, int]:
        """The body, and its length in bytes."""
        self._service.check_open()
        value, body = await read_json(request.scope, request.receive, decoder, self._service.bodies)
        return value, len(body)

    async def tokenize(self, request: Request) -> Response:
        """vLLM's `/tokenize`."""
        asked, body_len = await self._decode(request, tokenize_decoder)
        engine = self._service.check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise RequestError("Send either prompt or messages.", param="prompt")
        tokens: Sequence[int]
        if asked.prompt is not None:
            special = asked.add_special_tokens is not False
            tokens = await self._service.prompts.text(asked.prompt, special=special)
        else:
            messages = asked.messages or ()
            check_count(messages, self._service.config.limits.messages_max)
            read = partial(
                Chat,
                messages,
                asked.tools,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                template_kwargs=asked.chat_template_kwargs,
            )
            chat = await aside(read, body_len)
            tokens = await self._service.prompts.chat(chat, body_len)
        told = {"count": len(tokens), "max_model_len": engine.context_len, "tokens": tokens}
        names = TokenNames(engine.tokenizer)

        def write() -> Response:
            strs = [names.name(token) for token in tokens] if asked.return_token_strs else None
            return answer({**told, "token_strs": strs})

        return await aside(write, body_len)

    async def detokenize(self, request: Request) -> Response:
        asked, body_len = await self._decode(request, detokenize_decoder)
        engine = self._service.check_model(asked.model)
        return answer({"prompt": await aside(partial(_decoded, engine, asked.tokens), body_len)})

    async def abort(self, request: Request) -> Response:
        """Ends every generation of a request id (`X-Request-Id`) or a response id."""
        asked, _ = await self._decode(request, abort_decoder)
        engine = self._service.engine
        aborted = [name for name in self._service.ids_of(asked.request_id) if engine.abort(name)]
        if not aborted:
            raise RequestError(
                "No request in progress has this id.",
                status=404,
                param="request_id",
                code="request_not_found",
            )
        return answer({"aborted": aborted})

    async def flush_cache(self, _request: Request) -> Response:
        return answer({"flushed": self._service.check_open().flush_cache()})

    async def embeddings(self, _request: Request) -> Response:
        engine = self._service.engine
        raise RequestError(
            f"The model {engine.model_name!r} generates text; it has no embeddings.",
            param="model",
            code="unsupported_model",
        )


def _decoded(engine: Engine, tokens: Sequence[int]) -> str:
    for token in tokens:
        if token >= engine.vocab_size:
            raise RequestError(
                f"tokens holds {token}, beyond the vocabulary of {engine.vocab_size}",
                param="tokens",
            )
    text: str = engine.tokenizer.decode(tokens)
    return text
