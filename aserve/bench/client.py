"""A lean HTTP/1.1 client on trio for load: one connection, one request at a time.

It knows what OpenAI-compatible servers send (Content-Length or chunked bodies, server-sent events)
and no more. The load generator shares its cores with the server it measures, hence not httpx.
"""

import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

import trio

READ_BYTES = 65536
HEAD_BYTES_MAX = 65536


class Malformed(Exception):
    """The server's bytes are not the HTTP this client speaks, or ended early."""


class Target(NamedTuple):
    """Where requests go; `prefix` is the path every endpoint stands under, such as `/v1`."""

    scheme: str
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Of `http://host:port` or `http://host:port/v1`; ValueError says what is wrong."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:8000")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/") or "/v1")


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]


class Connection:
    """Opened on first use, kept alive between requests, reopened when the server has closed it."""

    def __init__(self, target: Target, api_key: str | None = None) -> None:
        self.target = target
        self.api_key = api_key
        self._stream: trio.abc.Stream | None = None
        self._buffer = bytearray()
        self._response = Response(0, {})
        self._left: int | None = 0  # bytes of a counted body; None: chunked

    async def aclose(self) -> None:
        stream, self._stream = self._stream, None
        self._buffer.clear()
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def send(self, method: str, path: str, body: bytes = b"") -> Response:
        """Send a request and read the response's head; `read` must follow, to its end."""
        request = self._head(method, path, len(body)) + body
        reused = self._stream is not None
        try:
            return await self._exchange(request)
        except (Malformed, trio.BrokenResourceError):
            await self.aclose()
            if not reused:
                raise
        # An idle connection may have been closed under us; a fresh one has no such excuse.
        return await self._exchange(request)

    async def read(self) -> bytes:
        """The next piece of the body as it arrives; b"" at its end."""
        if self._left is None:
            piece = await self._read_chunk()
        else:
            if self._left and not self._buffer:
                await self._fill()
            piece = bytes(self._buffer[: self._left])
            del self._buffer[: self._left]
            self._left -= len(piece)
        if not piece and self._response.headers.get("connection", "").lower() == "close":
            await self.aclose()
        return piece

    def _head(self, method: str, path: str, body_len: int) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self.target.host}:{self.target.port}",
            "Content-Type: application/json",
            f"Content-Length: {body_len}",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _exchange(self, request: bytes) -> Response:
        if self._stream is None:
            self._stream = await _connect(self.target)
        await self._stream.send_all(request)
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > HEAD_BYTES_MAX:
                raise Malformed("the response's head is too long")
            await self._fill()
        lines = bytes(self._buffer[:end]).decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        pairs = (line.partition(":") for line in lines[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        status = lines[0].split(" ")[1:2]
        if not status or not status[0].isdigit():
            raise Malformed(f"not a status line: {lines[0][:80]!r}")
        if "chunked" in headers.get("transfer-encoding", ""):
            self._left = None
        elif "content-length" in headers:
            self._left = _number(headers["content-length"], 10)
        else:
            raise Malformed("a response has neither Content-Length nor chunks")
        self._response = Response(int(status[0]), headers)
        return self._response

    async def _fill(self) -> None:
        assert self._stream is not None
        data = await self._stream.receive_some(READ_BYTES)
        if not data:
            raise Malformed("the server closed the connection in the middle of a response")
        self._buffer += data

    async def _read_chunk(self) -> bytes:
        while (end := self._buffer.find(b"\r\n")) < 0:
            await self._fill()
        size = _number(bytes(self._buffer[:end]).partition(b";")[0], 16)
        while len(self._buffer) < end + 2 + size + 2:
            await self._fill()
        piece = bytes(self._buffer[end + 2 : end + 2 + size])
        del self._buffer[: end + 2 + size + 2]
        return piece


def _number(text: str | bytes, radix: int) -> int:
    try:
        number = int(text, radix)
    except ValueError as error:
        raise Malformed(f"a length is no number: {text[:80]!r}") from error
    if number < 0:
        raise Malformed(f"a length is negative: {number}")
    return number


async def _connect(target: Target) -> trio.abc.Stream:
    if target.scheme == "https":
        return await trio.open_ssl_over_tcp_stream(target.host, target.port, https_compatible=True)
    return await trio.open_tcp_stream(target.host, target.port)


class Events:
    """Splits a server-sent-event body into the `data:` fields of its events, `[DONE]` left out."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, piece: bytes) -> list[bytes]:
        self._pending += piece.replace(b"\r", b"")
        *whole, self._pending = self._pending.split(b"\n\n")
        lines = (line for event in whole for line in event.split(b"\n"))
        fields = (line[5:].strip() for line in lines if line.startswith(b"data:"))
        return [field for field in fields if field != b"[DONE]"]
