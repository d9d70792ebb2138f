"""Tiny random models of every family, made by transformers, which is also the oracle."""

import functools
import pathlib
import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor

VOCAB = 160
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": PLAIN,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Sizes that many layouts divide: 12 KV heads, MLPs in 12 blocks, 12 experts.
DIVISIBLE = {
    "hidden_size": 48,
    "intermediate_size": 1152,
    "num_attention_heads": 24,
    "num_key_value_heads": 12,
    "head_dim": 8,
}

# name: (transformers' model type, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-rope-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-rope-linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "qwen3_moe",
        {**MOE, "head_dim": 32, "num_experts": 6, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3-moe-raw-weights": (
        "qwen3_moe",
        {
            **MOE,
            "head_dim": 16,
            "num_experts": 4,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": (
        "mixtral",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "divisible": ("llama", {**DIVISIBLE, "attention_bias": True, "mlp_bias": True}),
    "divisible-moe": (
        "qwen3_moe",
        {
            **DIVISIBLE,
            "moe_intermediate_size": 1152,
            "num_experts": 12,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
    ),
}
DENSE = tuple(name for name in FAMILIES if "moe" not in name and name != "mixtral")


def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose logits are spread enough to have a clear favourite."""
    kind, differs = FAMILIES[name]
    sizes = {key: dict(v) if isinstance(v, dict) else v for key, v in {**SIZES, **differs}.items()}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in path:
                parameter.copy_(1 + 0.2 * noise)
            elif "bias" in path:
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in path or "lm_head" in path:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * 1.2 * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()


@functools.cache
def saved(name: str) -> tuple[pathlib.Path, Any]:
    """(folder, model): written once a session, float32."""
    folder = pathlib.Path(_folder().name) / name
    model = build(name)
    model.save_pretrained(folder)
    return folder, model


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="aserve-families-")


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def oracle_logits(model: Any, tokens: list[int]) -> Tensor:
    """[len(tokens), vocab] float32."""
    return model(input_ids=torch.tensor([tokens])).logits[0].float()


def oracle_greedy(model: Any, tokens: list[int], new_len: int) -> list[int]:
    """Without a cache, so that the oracle has no pages, chunks or positions to get wrong."""
    tokens = list(tokens)
    for _ in range(new_len):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[-new_len:]
