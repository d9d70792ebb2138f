"""GGUF's words in Hugging Face's: architectures, metadata keys and tensor names."""

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from aserve.errors import ModelError
from aserve.text.gguf_file import GgufFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # and Mistral; Mixtral where it has experts
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}

# config.json field: metadata key under the architecture's name
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",  # divisors of the rotary frequencies; ours by name
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROUTERS = {"MixtralForCausalLM": "block_sparse_moe.gate", "Qwen3MoeForCausalLM": "mlp.gate"}
EXPERTS = {
    "MixtralForCausalLM": {
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    },
    "Qwen3MoeForCausalLM": {
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
    },
}
NAME = re.compile(r"blk\.(\d+)\.(\w+?)(?:\.(\d+))?\.(weight|bias)")


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields a config.json would have. Raises ModelError for an unknown architecture."""
    if file.arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{file.path} holds architecture {file.arch!r}, which is not supported: know {known}"
        )
    metadata = file.metadata
    config = {name: _one(metadata.get(f"{file.arch}.{key}")) for name, key in KEYS.items()}
    config["architectures"] = [ARCHITECTURES[file.arch]]
    if file.arch == "llama" and config["num_experts"]:
        config["architectures"] = ["MixtralForCausalLM"]
        config["num_local_experts"] = config["num_experts"]
    if isinstance(config["rms_norm_eps"], float):  # 1e-5 was written as the nearest float32
        config["rms_norm_eps"] = float(str(np.float32(config["rms_norm_eps"])))
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else None
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["rope_divisors"] = "rope_freqs.weight" in file.tensors
    config["norm_topk_prob"] = True
    tokenizer = {
        key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom")
    }
    config["bos_token_id"] = tokenizer.pop("bos")
    config["eos_token_id"] = list(dict.fromkeys(v for v in tokenizer.values() if v is not None))
    return config | _rope(file, config)


def _one(value: Any) -> Any:
    """A value that may be given per layer, if it is the same for all."""
    if isinstance(value, list) and value and len(set(value)) == 1:
        return value[0]
    return value


def _rope(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    def get(key: str) -> Any:
        return file.metadata.get(f"{file.arch}.rope.{key}")

    rope: dict[str, Any] = {}
    kind, factor = get("scaling.type"), get("scaling.factor")
    if kind is None and get("scale_linear"):
        kind, factor = "linear", get("scale_linear")
    if kind not in (None, "none"):
        rope |= {"rope_type": kind, "factor": factor}
        if original_len := get("scaling.original_context_length"):
            rope["original_max_position_embeddings"] = original_len
        for name in ("beta_fast", "beta_slow"):
            rope |= {name: beta} if (beta := get(f"scaling.yarn_{name}")) else {}
        extra = get("scaling.attn_factor")
        if isinstance(extra, float) and isinstance(factor, float) and factor > 1:
            # llama.cpp multiplies the usual factor by it; Hugging Face replaces that by its own.
            rope["attention_factor"] = extra * (1 + 0.1 * math.log(factor))
    return {
        "rope_theta": get("freq_base"),
        "rope_scaling": rope,
        "partial_rotary_factor": _partial(get("dimension_count"), config),
    }


def _partial(rot: Any, config: dict[str, Any]) -> float | None:
    sizes = (config["head_dim"], config["hidden_size"], config["num_attention_heads"])
    head_dim, hidden, heads = (s if isinstance(s, int) and s > 0 else None for s in sizes)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    return rot / head_dim if isinstance(rot, int) and rot and head_dim else None


def renamed(name: str, arch: str, stack: int) -> Iterator[tuple[str, int | None]]:
    """(Hugging Face name, expert of a stacked tensor or None); an unknown name stays as it is.

    `stack` is the outermost dimension: how many experts the tensor holds, if it is a stack.
    """
    match = NAME.fullmatch(name)
    if name in OUTER or match is None:
        yield OUTER.get(name, name), None
        return
    layer, stem, expert, suffix = match.groups()
    at = f"model.layers.{layer}."
    experts = EXPERTS.get(arch, {})
    if stem.endswith("_exps") and stem.removesuffix("_exps") in experts:
        pattern = experts[stem.removesuffix("_exps")]
        for number in range(stack):
            yield f"{at}{pattern.format(number)}.{suffix}", number
    elif expert is not None and stem in experts:  # one tensor per expert, in old Mixtral files
        yield f"{at}{experts[stem].format(expert)}.{suffix}", None
    elif stem == "ffn_gate_inp" and arch in ROUTERS:
        yield f"{at}{ROUTERS[arch]}.{suffix}", None
    elif expert is None and stem in INNER:
        yield f"{at}{INNER[stem]}.{suffix}", None
    else:
        yield name, None
