"""The routes, and the one layer around them."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from aserve.api import chat, completions
from aserve.api.control import Control
from aserve.api.edge import Edge
from aserve.api.generate import GenerateEndpoint
from aserve.api.metrics import Metrics
from aserve.api.protocol import chat_decoder, completion_decoder
from aserve.api.refusal import Allowed
from aserve.api.service import Service
from aserve.errors import RequestError


def build_app(service: Service) -> Starlette:
    """An ASGI application whose every failure is OpenAI-shaped JSON."""
    control, metrics = Control(service), Metrics(service)
    talk = GenerateEndpoint(service, chat_decoder, chat.prepare)
    complete = GenerateEndpoint(service, completion_decoder, completions.prepare)
    routes = [
        Route("/v1/chat/completions", talk, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/embeddings", control.embeddings, methods=["POST"]),
        Route("/v1/models", control.models),
        Route("/v1/models/{model_id:path}", control.model),
        Route("/tokenize", control.tokenize, methods=["POST"]),
        Route("/detokenize", control.detokenize, methods=["POST"]),
        Route("/abort", control.abort, methods=["POST"]),
        Route("/flush_cache", control.flush_cache, methods=["POST"]),
        Route("/health", control.health),
        Route("/ready", control.ready),
        Route("/version", control.version),
        Route("/debug/state", control.debug_state),
        Route("/metrics", metrics.__call__),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Edge, service=service)],
        exception_handlers={HTTPException: _refuse},
    )
    # A redirected POST loses its body or its key with many clients; a 404 says what is wrong.
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, on their way to the edge."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"There is no route {request.url.path[:200]!r} here.",
        405: f"{request.method} is not allowed on {request.url.path[:200]!r}.",
    }.get(error.status_code, str(error.detail))
    code = _CODES.get(error.status_code)
    allowed = (error.headers or {}).get("Allow")
    raise RequestError(message, status=error.status_code, code=code) from (
        None if allowed is None else Allowed(allowed)
    )


_CODES = {404: "route_not_found", 405: "method_not_allowed"}
