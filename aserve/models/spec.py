"""What a config.json says about a decoder, checked: sizes, rotary parameters, end tokens.

Reads the fields of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). GGUF
metadata is turned into the same fields first (weights/gguf_names.py). Weights are not looked at.
"""

import dataclasses
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from aserve.errors import ModelError
from aserve.tensor.rope import rope_parameters

LAYERS_MAX = 1024
COUNT_MAX = 2**31 - 1
logger = logging.getLogger("aserve.models")


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of `layers`: the best `per_token` of `count` by softmax of the router."""

    count: int
    per_token: int
    inner: int
    renormalise: bool  # the chosen weights sum to one
    layers: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSpec:
    arch: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context_len: int
    eps: float
    rope: Mapping[str, Any]  # as tensor.rope.rope_parameters gives them
    tied: bool
    dtype: torch.dtype  # of weights and KV: bfloat16 or float32
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_divisors: bool = False  # the checkpoint has a divisor for each rotary frequency
    experts: Experts | None = None


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object, or ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


class Fields:
    """The fields of a config, each checked when asked for; `findings` collects what is wrong."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.findings: list[str] = []

    def count(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= COUNT_MAX:
            self.findings.append(f"{name} is {value!r}: a positive whole number is needed")
            return 1
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            self.findings.append(f"{name} is {value!r}: true or false is needed")
        return default if value is None else bool(value)

    def number(self, name: str, default: float) -> float:
        value = self.config.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            self.findings.append(f"{name} is {value!r}: a positive number is needed")
            return default
        return float(value)


def decoder_spec(arch: str, fields: Fields, dtype: torch.dtype, extra: dict[str, Any]) -> ModelSpec:
    """The spec of a Llama-shaped decoder; `extra` is what its family adds. Raises ModelError."""
    config = fields.config
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    spec = ModelSpec(
        arch=arch,
        hidden=hidden,
        inner=fields.count("intermediate_size"),
        layers=fields.count("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads),
        vocab=fields.count("vocab_size"),
        context_len=_context_len(fields, extra.pop("window")),
        eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        tied=fields.flag("tie_word_embeddings", False),
        dtype=dtype,
        eos_ids=token_ids(config.get("eos_token_id")),
        bos_id=next(iter(token_ids(config.get("bos_token_id"))), None),
        rope_divisors=fields.flag("rope_divisors", False),
        **extra,
    )
    if spec.layers > LAYERS_MAX:
        fields.findings.append(f"num_hidden_layers is {spec.layers}, at most {LAYERS_MAX}")
    if spec.heads % spec.kv_heads:
        fields.findings.append(f"{spec.heads} heads do not share {spec.kv_heads} KV heads evenly")
    if spec.head_dim % 2:
        fields.findings.append(f"head_dim is {spec.head_dim}: an even number is needed")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.findings.append(f"hidden_act {activation!r} is not supported, only 'silu'")
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        fields.findings.append(
            f"its weights are quantised ({method}): take the bf16 release or a GGUF file"
        )
    if fields.findings:
        raise ModelError([f"the config of this {arch} is refused:", *fields.findings])
    return spec


def token_ids(value: Any) -> tuple[int, ...]:
    """A config gives one id, a list of ids, or nothing."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """The attention window, where a config sets one and uses it."""
    kinds = config.get("layer_types")
    if config.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds):
        return None
    window = config.get("sliding_window")
    return window if isinstance(window, int) and window > 0 else None


def _context_len(fields: Fields, window: int | None) -> int:
    context_len = fields.count("max_position_embeddings")
    if window is None or window >= context_len:
        return context_len
    # Up to the window's length a sliding window hides nothing, and beyond it we would be wrong.
    logger.warning(
        "this model attends within a window of %d tokens, which is not supported: its context of "
        "%d is cut to that",
        window,
        context_len,
    )
    return window


def _rope(fields: Fields) -> dict[str, Any]:
    try:
        rope = rope_parameters(fields.config)
        rope.pop("type", None)  # an older spelling of rope_type
        return rope
    except ModelError as error:
        fields.findings += error.findings
    except (TypeError, AttributeError, ValueError) as error:
        fields.findings.append(f"the rope parameters cannot be read: {error}")
    return {}
