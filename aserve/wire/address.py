"""Where a plane can be reached: `memory:`, `unix:/path`, `tcp:host:port`. Only the words."""

from typing import TypeAlias

import msgspec

from aserve.errors import ConfigError

# The kernel's sockaddr_un holds 108 bytes with the closing zero.
UNIX_PATH_BYTES_MAX = 107

FORMS = "write `memory:`, `unix:/path/of/socket` or `tcp:host:port`"


class Memory(msgspec.Struct, frozen=True):
    """Inside one process: nothing to connect to."""

    def __str__(self) -> str:
        return "memory:"


class Unix(msgspec.Struct, frozen=True):
    """A socket in the file system of this host."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


class Tcp(msgspec.Struct, frozen=True):
    """A port of a host; to listen on port 0 takes any that is free."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


Address: TypeAlias = Memory | Unix | Tcp


def parse_address(text: str) -> Address:
    """The inverse of `str`. Raises ConfigError that says what to write instead."""
    scheme, colon, rest = text.partition(":")
    if not colon or scheme not in _PARSERS:
        raise ConfigError(f"{text!r} is no address; {FORMS}")
    return _PARSERS[scheme](text, rest)


def _parse_memory(text: str, rest: str) -> Address:
    if rest:
        raise ConfigError(f"{text!r}: nothing follows `memory:`, it is this process")
    return Memory()


def _parse_unix(text: str, rest: str) -> Address:
    if not rest.startswith("/") or "\0" in rest:
        raise ConfigError(f"{text!r}: write an absolute path, as `unix:/run/aserve/request.sock`")
    if len(rest.encode()) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"{text!r}: the path has {len(rest.encode())} bytes, a socket's at most "
            f"{UNIX_PATH_BYTES_MAX}; choose a shorter folder"
        )
    return Unix(rest)


def _parse_tcp(text: str, rest: str) -> Address:
    host, colon, port = rest.rpartition(":")
    if not colon or not host:
        raise ConfigError(f"{text!r}: write host and port, as `tcp:127.0.0.1:7000`")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r}: put an IPv6 host in brackets, as `tcp:[::1]:7000`")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{text!r}: the port is a number from 0 to 65535, not {port!r}")
    return Tcp(host, int(port))


_PARSERS = {"memory": _parse_memory, "unix": _parse_unix, "tcp": _parse_tcp}
