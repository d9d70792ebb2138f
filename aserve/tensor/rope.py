"""Rotary position tables: inverse frequencies by kind (default, linear, llama3, yarn) and cos/sin.

Takes the fields of a Hugging Face config.json, both the `rope_scaling` of transformers 4 and the
`rope_parameters` of transformers 5. Rotating is `Ops.rope`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aserve.errors import ModelError

KINDS = ("default", "linear", "llama3", "yarn")
NEEDS = {
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
NUMBER_MAX = 1e15
YARN_MAY = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")


@dataclasses.dataclass(frozen=True, slots=True)
class RopeTable:
    """float32 [positions, rot]: cosines of rot / 2 angles, then their sines, times the factor."""

    cos_sin_PR: Tensor

    @property
    def rot(self) -> int:
        return self.cos_sin_PR.shape[1]


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of a config in one dict: `rope_type`, `rope_theta`, what the kind needs.

    Raises ModelError for an unknown kind or a missing field.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError("rope parameters that differ per layer type are not supported")
    merged = dict(given)
    merged["rope_type"] = given.get("rope_type") or given.get("type") or "default"
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    merged["rope_theta"] = float(theta)
    if merged["rope_theta"] <= 1:
        raise ModelError(f"rope_theta is {theta!r}: a number above 1 is needed")
    merged.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    context_len = config.get("max_position_embeddings")
    original_len = config.get("original_max_position_embeddings")
    if original_len is not None:
        merged["original_max_position_embeddings"] = original_len
    elif context_len is not None:
        merged.setdefault("original_max_position_embeddings", context_len)
    _check(merged, context_len)
    return merged


def inv_freq(parameters: Mapping[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """(float32 [rot / 2] inverse frequencies, factor on cos and sin), from `rope_parameters`.

    Formulas: Su et al. 2021; linear: Chen et al. 2023; yarn: Peng et al. 2023; llama3: Llama 3.1.
    """
    rot = int(head_dim * parameters["partial_rotary_factor"])
    if rot < 2 or rot % 2 or rot > head_dim:
        raise ModelError(f"rotary dimension {rot} is not an even number up to head_dim {head_dim}")
    exponents = torch.arange(0, rot, 2, dtype=torch.int64).float() / rot
    plain = 1.0 / (parameters["rope_theta"] ** exponents)
    kind = parameters["rope_type"]
    if kind == "linear":
        return plain / parameters["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, parameters), 1.0
    if kind == "yarn":
        return _yarn(parameters, rot), _yarn_factor(parameters)
    return plain, 1.0


def rope_table(config: Mapping[str, Any], head_dim: int, positions: int) -> RopeTable:
    """The table for positions 0 .. positions - 1 of a model with this config.json."""
    frequencies, factor = inv_freq(rope_parameters(config), head_dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return RopeTable(torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1).contiguous())


def _check(parameters: dict[str, Any], context_len: int | None) -> None:
    kind = parameters["rope_type"]
    if kind not in KINDS:
        raise ModelError(f"rope type {kind!r} is not supported: know {', '.join(KINDS)}")
    _check_numbers(parameters, (*NEEDS.get(kind, ()), "rope_theta", "partial_rotary_factor"))
    if kind == "yarn":
        _check_numbers(parameters, [name for name in YARN_MAY if parameters.get(name) != 0])
    if kind == "yarn" and parameters.get("factor") is None and context_len is not None:
        # DeepSeek leaves the factor to the ratio of the two lengths.
        parameters["factor"] = context_len / parameters["original_max_position_embeddings"]
    missing = [name for name in NEEDS.get(kind, ()) if parameters.get(name) is None]
    if missing:
        raise ModelError(f"rope type {kind!r} needs {', '.join(missing)}")


def _check_numbers(parameters: Mapping[str, Any], names: Sequence[str]) -> None:
    given = {name: parameters[name] for name in names if parameters.get(name) is not None}
    wrong = [f"{name} is {value!r}" for name, value in given.items() if not _is_positive(value)]
    if wrong:
        raise ModelError(f"rope parameters need positive numbers: {', '.join(wrong)}")


def _is_positive(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < NUMBER_MAX


def _llama3(plain: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original_len = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    long_low, long_high = original_len / low, original_len / high
    scaled = torch.where(wavelength > long_low, plain / factor, plain)
    smooth = (original_len / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = ~(wavelength < long_high) & ~(wavelength > long_low)
    return torch.where(is_between, between, scaled)


def _yarn(parameters: Mapping[str, Any], rot: int) -> Tensor:
    base, factor = parameters["rope_theta"], parameters["factor"]
    powers = base ** (torch.arange(0, rot, 2).float() / rot)
    low = _yarn_dim(parameters, rot, parameters.get("beta_fast") or 32)
    high = _yarn_dim(parameters, rot, parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    span = high - low if high != low else 0.001
    ramp = torch.clamp((torch.arange(rot // 2, dtype=torch.float32) - low) / span, 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_dim(parameters: Mapping[str, Any], rot: int, rotations: float) -> float:
    """The dimension that turns `rotations` times over the original context."""
    original_len = parameters["original_max_position_embeddings"]
    base = parameters["rope_theta"]
    return rot * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(base))


def _yarn_factor(parameters: Mapping[str, Any]) -> float:
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    factor = parameters["factor"]
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
