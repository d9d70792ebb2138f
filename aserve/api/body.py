"""Reading a request body: bounded in bytes, in time and in depth before anything parses it."""

import re
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec
import trio
from starlette.types import Receive, Scope

from aserve.api.refusal import wrong_field
from aserve.errors import RequestError

T = TypeVar("T")
DEPTH_MAX = 96
BODIES_MAX = 32  # bodies of full size being read at one time
THREAD_BYTES = 1 << 16  # beyond this, reading would hold up the streams of others for some ms
NOT_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
QUOTED = re.compile(rb'"[^"]*"')


class ClientGone(Exception):
    """The client hung up before it had sent its whole request; nobody is left to answer."""


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class Bodies:
    """The limits of request bodies: of each, and of all that are being read at one time."""

    def __init__(self, bytes_max: int, limit_s: float) -> None:
        self._bytes_max = bytes_max
        self._limit_s = limit_s
        self._bytes_free = bytes_max * BODIES_MAX

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body; 413 beyond the limit of one, 429 beyond that of all, 408 if too slow."""
        declared = header(scope, b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > self._bytes_max:
            raise self._too_large()
        body = bytearray()
        with trio.move_on_after(self._limit_s):
            try:
                while await self._read_part(receive, body):
                    pass
                return bytes(body)
            finally:
                self._bytes_free += len(body)
        raise RequestError(
            f"The request body did not arrive within {self._limit_s:g} s.", status=408
        )

    async def _read_part(self, receive: Receive, body: bytearray) -> bool:
        """Whether more is to come."""
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        if len(body) + len(part) > self._bytes_max:
            raise self._too_large()
        if len(part) > self._bytes_free:
            raise RequestError("Too many large requests at once.", status=429, code="overloaded")
        body += part
        self._bytes_free -= len(part)
        return bool(message.get("more_body", False))

    def _too_large(self) -> RequestError:
        return RequestError(
            f"The request body is larger than {self._bytes_max} bytes.",
            status=413,
            code="body_too_large",
        )


async def read_json(
    scope: Scope, receive: Receive, decoder: "msgspec.json.Decoder[T]", bodies: Bodies
) -> tuple[T, bytes]:
    """The body as the decoder's type, and as it came. Raises RequestError (4xx)."""
    check_json_type(scope)
    body = await bodies.read(scope, receive)
    return await decode_body(body, decoder), body


def check_json_type(scope: Scope) -> None:
    """415 unless the body is declared as JSON or not declared at all."""
    declared = header(scope, b"content-type")
    if declared is None:
        return
    kind = declared.split(b";")[0].strip().lower()
    if kind != b"application/json" and not kind.endswith(b"+json"):
        raise RequestError(
            f"Content-Type is {kind.decode('latin1')!r}; this route reads application/json.",
            status=415,
            code="unsupported_media_type",
        )


async def decode_body(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    """`body` as the decoder's type; every way of being wrong is a RequestError(400)."""
    return await aside(partial(decode, body, decoder), len(body))


async def aside(function: Callable[[], T], body_len: int) -> T:
    """`function()`, in another thread if the body it works on is large."""
    if body_len > THREAD_BYTES:
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    return function()


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    if not body.strip():
        raise RequestError("The request has no body; send a JSON object.", code="invalid_json")
    check_depth(body)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise wrong_field(error) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}", code="invalid_json") from None


def check_depth(body: bytes, depth_max: int = DEPTH_MAX) -> None:
    """400 for JSON nested deeper than `depth_max`, in a few linear passes and without recursion."""
    if body.count(b"[") + body.count(b"{") <= depth_max:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = QUOTED.sub(b"", plain.translate(None, NOT_BRACKETS))
    for _ in range(depth_max):
        # One pass takes away the innermost level everywhere, so passes bound the depth.
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(brackets) in (0, before):
            break
    if brackets:
        raise RequestError(
            f"The JSON nests deeper than {depth_max} levels or its brackets do not match.",
            code="invalid_json",
        )
