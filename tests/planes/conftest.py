"""Where the sockets of a test are."""

from collections.abc import Iterator

import pytest

from aserve.wire.listener import open_socket_folder


@pytest.fixture
def folder() -> Iterator[str]:
    with open_socket_folder() as path:
        yield path
