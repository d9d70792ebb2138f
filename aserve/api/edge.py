"""The outermost layer: keys, request ids, the log line, and an answer for every failure."""

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import trio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aserve.api.body import ClientGone, header
from aserve.api.call import Call
from aserve.api.refusal import error_headers, error_json
from aserve.api.service import Service
from aserve.errors import RequestError

logger = logging.getLogger("aserve.http")
OPEN_PATHS = frozenset(("/health", "/ready"))
QUIET_PATHS = frozenset(("/health", "/ready", "/metrics"))
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
DISCARD_BYTES_MAX = 64 << 20
DISCARD_S = 2.0


class Edge:
    """ASGI middleware around every route; no exception passes it."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        key = service.config.server.api_key
        self._key_digest = hashlib.sha256(key.encode()).digest() if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = header(scope, b"x-request-id")
        call = Call(scope["method"], scope["path"], offered.decode("latin1") if offered else None)
        scope["call"] = call
        self._service.calls.add(call)
        try:
            await self._answer(call, scope, _Reader(receive), _sender(call, send))
        except ClientGone:
            call.status = call.status or 499  # nginx's number for a client that hung up
            call.error = call.error or "client disconnected"
        finally:
            self._service.calls.discard(call)
            self._log(call, scope)

    async def _answer(self, call: Call, scope: Scope, receive: "_Reader", send: Send) -> None:
        try:
            self._check_key(scope)
            await self._app(scope, receive, send)
            return
        except RequestError as error:
            failure = error
        except ClientGone:
            raise
        except Exception:
            logger.exception("request %s failed", call.request_id)
            failure = RequestError(
                f"Internal error; the server's log has it under request {call.request_id}.",
                status=500,
                code="internal_error",
            )
        call.error = str(failure)
        if call.status == 0:
            headers = error_headers(failure)
            # Who is late with a body (408) is not waited for any longer.
            if failure.status == 408 or not await receive.discard():
                headers.append((b"connection", b"close"))
            await send_json(send, error_json(failure), failure.status, headers)
        elif call.event_stream:
            event = b"data: " + error_json(failure) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": False})

    def _check_key(self, scope: Scope) -> None:
        """Compared as digests, so that neither content nor length of the key shows in the time."""
        if self._key_digest is None or scope["path"] in OPEN_PATHS:
            return
        kind, _, offered = (header(scope, b"authorization") or b"").partition(b" ")
        digest = hashlib.sha256(offered.strip()).digest()
        if kind.lower() != b"bearer" or not hmac.compare_digest(digest, self._key_digest):
            raise RequestError(
                "A valid API key is needed: Authorization: Bearer KEY.",
                status=401,
                code="invalid_api_key",
            )

    def _log(self, call: Call, scope: Scope) -> None:
        route = scope.get("route")
        path = route.path if route is not None else "other"
        # A label per word that a client may invent would be a series per word.
        method = call.method if call.method in METHODS else "other"
        self._service.responses[method, path, call.status] += 1
        level = logging.DEBUG if call.path in QUIET_PATHS else logging.INFO
        if not logger.isEnabledFor(level):
            return
        now = trio.current_time()
        fields: dict[str, object] = {
            "request_id": call.request_id,
            "method": call.method,
            "path": call.path,
            "status": call.status,
            "duration_ms": round((now - call.started_at) * 1e3, 1),
        }
        if call.prompt_tokens:
            fields["prompt_tokens"] = call.prompt_tokens
            fields["completion_tokens"] = call.completion_tokens
        if call.first_at is not None:
            fields["ttft_ms"] = round((call.first_at - call.started_at) * 1e3, 1)
        if call.error is not None:
            fields["error"] = call.error
        logger.log(level, "request", extra={"fields": fields})


class _Reader:
    """`receive` that knows whether the client still owes part of its request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._complete = False

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._complete = True
        return message

    async def discard(self) -> bool:
        """Read the rest before refusing: most clients look for an answer only after sending.

        False if there is more than anybody waits for.
        """
        taken = 0
        with trio.move_on_after(DISCARD_S):
            while not self._complete and taken < DISCARD_BYTES_MAX:
                taken += len((await self()).get("body", b""))
        return self._complete


def _sender(call: Call, send: Send) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    request_id = call.request_id.encode()

    async def send_marked(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
        await send(message)

    return send_marked


async def send_json(
    send: Send,
    body: bytes,
    status: int = 200,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """A whole response; `headers` replace the plain JSON ones."""
    fields = [(b"content-type", b"application/json")] if headers is None else list(headers)
    fields.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})
