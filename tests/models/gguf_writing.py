"""Writes transformers' tiny models as GGUF, the way llama.cpp's converter lays them out."""

import pathlib
import re
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch

from aserve.models.weights.gguf_names import EXPERTS, INNER, OUTER

ARCHES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
Kind = gguf.GGMLQuantizationType
F32 = Kind.F32


def write_gguf(
    model: Any,
    path: pathlib.Path,
    kind: Kind | Callable[[str], Kind] = F32,
    *,
    stacked_experts: bool = True,
    extra: dict[str, np.ndarray] | None = None,
) -> pathlib.Path:
    """Matrices as `kind` (which may depend on the GGUF name), vectors as float32. `extra` adds or
    replaces tensors by GGUF name."""
    config = model.config
    arch = ARCHES[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, config)
    tensors = _tensors(model, arch, stacked_experts) | (extra or {})
    for name, values in tensors.items():
        own = kind if isinstance(kind, Kind) else kind(name)
        if values.ndim > 1 and own != F32:
            writer.add_tensor(name, quantised(values, own), raw_dtype=own)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """uint8 [..., row bytes]: as `gguf.quantize`, which does not know Q4_K."""
    if kind != Kind.Q4_K:
        return gguf.quantize(values, kind)
    parts = values.reshape(-1, 8, 32)
    least = np.maximum(0, -parts.min(-1))
    step = (parts.max(-1) + least) / 15
    d, dmin = (np.float16(x.max(-1, keepdims=True) / 63) for x in (step, least))
    sc, mn = (np.rint(x / y.astype(np.float32)) for x, y in ((step, d), (least, dmin)))
    q = (parts + (dmin * mn)[..., None]) / np.maximum(d * sc, 1e-9)[..., None]
    q, sc, mn = (x.astype(np.uint8) for x in (np.clip(np.rint(q), 0, 15), sc, mn))
    scales = [sc[:, :4] | sc[:, 4:] >> 4 << 6, mn[:, :4] | mn[:, 4:] >> 4 << 6]
    scales.append(sc[:, 4:] & 15 | (mn[:, 4:] & 15) << 4)
    halves = [np.ascontiguousarray(x).view(np.uint8) for x in (d, dmin)]
    nibbles = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(q), 128)
    return np.concatenate([*halves, *scales, nibbles], axis=1).reshape(*values.shape[:-1], -1)


def _metadata(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    if config.model_type in ("mixtral", "qwen3_moe"):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _tensors(model: Any, arch: str, stacked_experts: bool) -> dict[str, np.ndarray]:
    config = model.config
    outer = {value: key for key, value in OUTER.items()}
    inner = {value: key for key, value in INNER.items()}
    found: dict[str, np.ndarray] = {}
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(torch.float32).numpy()
        if name in outer and not (tied and name == "lm_head.weight"):
            found[outer[name]] = values
        if not (match := re.fullmatch(r"model\.layers\.(\d+)\.(.+?)(\.weight|\.bias)?", name)):
            continue
        at, stem, suffix = f"blk.{match[1]}.", match[2], match[3] or ""
        if arch == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            is_q = stem == "self_attn.q_proj"
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            values = interleaved(values, heads)
        if stem == "mlp.gate":
            found[f"{at}ffn_gate_inp.weight"] = values
        elif stem == "mlp.experts.gate_up_proj":
            half = values.shape[1] // 2
            found |= _experts(f"{at}ffn_gate", values[:, :half], stacked_experts)
            found |= _experts(f"{at}ffn_up", values[:, half:], stacked_experts)
        elif stem == "mlp.experts.down_proj":
            found |= _experts(f"{at}ffn_down", values, stacked_experts)
        else:
            found[f"{at}{inner[stem]}{suffix}"] = values
    return found


def _experts(name: str, values: np.ndarray, stacked: bool) -> dict[str, np.ndarray]:
    assert name.split(".")[-1] in EXPERTS["MixtralForCausalLM"]
    if stacked:
        return {f"{name}_exps.weight": np.ascontiguousarray(values)}
    return {f"{name}.{e}.weight": np.ascontiguousarray(part) for e, part in enumerate(values)}


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows i and i + half of each head side by side: llama.cpp's order for interleaved rotation."""
    half = values.shape[0] // heads // 2
    order = [
        head * 2 * half + i + side * half
        for head in range(heads)
        for i in range(half)
        for side in range(2)
    ]
    return np.ascontiguousarray(values[order])
