"""One server for most tests of a file; tests that need another configuration start their own.

It ends with its file: tests elsewhere look at what is left of an engine in this process.
"""

import pathlib
from collections.abc import Iterator

import pytest

from tests.api.serving import Running, config_of, running


@pytest.fixture(scope="module")
def server(tiny_model_path: pathlib.Path) -> Iterator[Running]:
    with running(config_of(tiny_model_path)) as started:
        yield started
