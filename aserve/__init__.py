"""aserve serves large language models. Names load when first used, so importing it is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aserve.actors.completion import Completion
    from aserve.actors.engine import open_engine
    from aserve.actors.llm import LLM
    from aserve.core.config import Config
    from aserve.core.request import Delta, SamplingParams, StructuredOutput, Usage
    from aserve.errors import AserveError, ConfigError, ModelError, RequestError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AserveError",
    "Completion",
    "Config",
    "ConfigError",
    "Delta",
    "ModelError",
    "RequestError",
    "SamplingParams",
    "StructuredOutput",
    "Usage",
    "__version__",
    "open_engine",
]

_HOMES = {
    "LLM": "aserve.actors.llm",
    "Completion": "aserve.actors.completion",
    "open_engine": "aserve.actors.engine",
    "Config": "aserve.core.config",
    "Delta": "aserve.core.request",
    "SamplingParams": "aserve.core.request",
    "StructuredOutput": "aserve.core.request",
    "Usage": "aserve.core.request",
    "AserveError": "aserve.errors",
    "ConfigError": "aserve.errors",
    "ModelError": "aserve.errors",
    "RequestError": "aserve.errors",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'aserve' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
