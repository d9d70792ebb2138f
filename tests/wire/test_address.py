"""Addresses come back as they were written, and what is none says what to write instead."""

import pytest

from aserve.errors import ConfigError
from aserve.wire.address import Memory, Tcp, Unix, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("memory:", Memory()),
        ("unix:/run/aserve/a b.sock", Unix("/run/aserve/a b.sock")),
        ("tcp:127.0.0.1:0", Tcp("127.0.0.1", 0)),
        ("tcp:node-1.example:65535", Tcp("node-1.example", 65535)),
        ("tcp:[::1]:7000", Tcp("::1", 7000)),
    ],
)
def test_an_address_is_parsed_and_printed_alike(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`tcp:host:port`"),
        ("127.0.0.1:7000", "`tcp:host:port`"),
        ("http://x", "`unix:/path/of/socket`"),
        ("/run/a.sock", "`unix:/path/of/socket`"),
        ("memory:x", "nothing follows `memory:`"),
        ("unix:", "an absolute path"),
        ("unix:a.sock", "an absolute path"),
        ("unix:/a\0b", "an absolute path"),
        ("unix:/" + "a" * 107, "the path has 108 bytes, a socket's at most 107"),
        ("unix:/" + "ä" * 54, "the path has 109 bytes"),
        ("tcp:", "host and port"),
        ("tcp:7000", "host and port"),
        ("tcp::7000", "host and port"),
        ("tcp:::1:7000", "in brackets"),
        ("tcp:host:", "from 0 to 65535"),
        ("tcp:host:http", "from 0 to 65535, not 'http'"),
        ("tcp:host:65536", "from 0 to 65535"),
        ("tcp:host:-1", "from 0 to 65535"),
        ("tcp:host:²", "from 0 to 65535"),
    ],
)
def test_what_is_no_address_says_what_to_write(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert said in str(caught.value)


def test_the_longest_path_fits() -> None:
    path = "/" + "a" * 106
    assert parse_address(f"unix:{path}") == Unix(path)
