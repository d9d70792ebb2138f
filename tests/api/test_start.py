"""What a server loads to start: memory that every deployment pays for."""

import subprocess
import sys

import pytest

# Big, and reached by a careless import: of other engines, plots, compilers, or of hubs and clients.
UNWANTED = (
    *("transformers", "huggingface_hub", "sympy", "networkx", "pandas", "scipy", "matplotlib"),
    *("torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torchvision"),
    *("httpx", "requests", "aiohttp", "openai", "uvicorn", "fastapi", "pydantic"),
    *("aserve.bench", "aserve.testing", "aserve.tensor.sampler_reference"),
)
ASK = """
import sys
import aserve.cli, aserve.api.server, aserve.actors.engine, aserve.actors.here
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_server_starts_without_what_it_does_not_use() -> None:
    asked = subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True)
    loaded = set(asked.stdout.split())
    assert "aserve.api.server" in loaded
    assert loaded.isdisjoint(UNWANTED), sorted(loaded.intersection(UNWANTED))
