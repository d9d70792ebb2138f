"""One line per event on stderr, as text or as JSON, always with the request it belongs to."""

import logging
import sys
import time

import msgspec

from aserve.core.config import Server

UNQUOTED = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./:%+,@~")


def start_log(config: Server) -> None:
    """Send everything under the logger `aserve` to stderr; a second call changes nothing."""
    logger = logging.getLogger("aserve")
    logger.setLevel(config.log_level.upper())
    if logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_json else TextLines())
    logger.addHandler(handler)
    logger.propagate = False


def _parts(record: logging.LogRecord) -> tuple[str, dict[str, object]]:
    clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    fields: dict[str, object] = dict(getattr(record, "fields", {}))
    # Clients choose some of it, and may choose what UTF-8 cannot spell.
    clean = {
        name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
    }
    return f"{clock}.{int(record.msecs):03d}Z", clean


class TextLines(logging.Formatter):
    """`2026-11-30T07:00:00.123Z INFO aserve.http request status=200 path=/v1/models`."""

    def format(self, record: logging.LogRecord) -> str:
        clock, fields = _parts(record)
        line = f"{clock} {record.levelname} {record.name} {record.getMessage()}"
        for name, value in fields.items():
            line += f" {name}={_quoted(str(value))}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _quoted(text: str) -> str:
    """What a client chose must not be able to end a line or pretend to be a field."""
    if text and UNQUOTED.issuperset(text):
        return text
    return msgspec.json.encode(text).decode()


class JsonLines(logging.Formatter):
    """The same as one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        clock, fields = _parts(record)
        line: dict[str, object] = {
            "time": clock,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()
