"""OpenAI-shaped errors: which status becomes which JSON, and msgspec's findings made one."""

import re
from collections.abc import Mapping

import msgspec

from aserve.errors import RequestError

# https://platform.openai.com/docs/guides/error-codes: `type` by status, invalid_request_error for
# every other 4xx.
TYPES: Mapping[int, str] = {401: "authentication_error", 429: "rate_limit_error"}
MESSAGE_LEN_MAX = 2000
PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>.*)`$")


def error_of(error: RequestError) -> dict[str, object]:
    """The `error` object of OpenAI's schema: message, type, param, code, all four always there."""
    fallback = "server_error" if error.status >= 500 else "invalid_request_error"
    message = str(error)
    if len(message) > MESSAGE_LEN_MAX:
        message = message[:MESSAGE_LEN_MAX] + "…"
    # A message may quote what the client sent, lone surrogates included, which JSON cannot carry.
    message = message.encode("utf-8", "replace").decode()
    return {
        "message": message,
        "type": TYPES.get(error.status, fallback),
        "param": error.param,
        "code": error.code,
    }


def error_json(error: RequestError) -> bytes:
    return msgspec.json.encode({"error": error_of(error)})


class Allowed(Exception):
    """The methods a route knows; the cause of a 405, which must name them (RFC 9110 15.5.6)."""


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    headers = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, error.retry_after_s)))
    elif error.status in (429, 503):
        headers.append((b"retry-after", b"1"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error.__cause__, Allowed):
        headers.append((b"allow", str(error.__cause__).encode("latin1")))
    return headers


def wrong_field(error: msgspec.ValidationError) -> RequestError:
    """A 400 that names the field msgspec found wrong: `$.a[0].b` becomes param `a[0].b`."""
    message = str(error)
    place = PLACE.search(message)
    if place is None:
        missing = re.search(r"required field `(?P<path>[^`]+)`", message)
        param = missing["path"] if missing else None
    else:
        param = place["path"].removesuffix("[...]") or None
        message = message[: place.start()]
        missing = re.search(r"required field `(?P<path>[^`]+)`", message)
        if missing:
            param = f"{param}.{missing['path']}" if param else missing["path"]
    where = f"{param}: " if param else ""
    return RequestError(f"{where}{message}", param=param, code="invalid_type")
