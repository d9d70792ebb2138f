"""One server for most tests; tests that need another configuration start their own."""

import pathlib
from collections.abc import Iterator

import pytest

from tests.api.serving import Running, config_of, running


@pytest.fixture(scope="session")
def server(tiny_model_path: pathlib.Path) -> Iterator[Running]:
    with running(config_of(tiny_model_path)) as started:
        yield started
