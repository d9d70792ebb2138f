"""Llama, Mistral, Qwen2 and Qwen3: one decoder; what sets them apart is biases and q/k norms."""

from typing import Any

from aserve.models.decoder import SwiGlu
from aserve.models.spec import Fields, ModelSpec, sliding_window
from aserve.models.weights.loader import Weights
from aserve.tensor.ops import Ops


def mlp_of(spec: ModelSpec, layer: int, weights: Weights, ops: Ops) -> SwiGlu:
    at = f"model.layers.{layer}.mlp"
    names = (f"{at}.gate_proj", f"{at}.up_proj", f"{at}.down_proj")
    return SwiGlu(names, (spec.hidden, spec.inner), weights, ops, bias=spec.mlp_bias)


def llama(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "window": None,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
    }


def mistral(fields: Fields) -> dict[str, Any]:
    # Mistral 7B 0.1 has a window, and a config without the key means that one.
    return {"window": sliding_window({"sliding_window": 4096, **fields.config})}


def qwen2(fields: Fields) -> dict[str, Any]:
    return {"window": qwen_window(fields), "qkv_bias": True}


def qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {
        "window": qwen_window(fields),
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
    }


def qwen_window(fields: Fields) -> int | None:
    """Qwen writes a window down even where it is off, which it is by default."""
    return sliding_window({"use_sliding_window": False, **fields.config})
