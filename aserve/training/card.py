"""What is shipped: config.json and model.safetensors in the public layout, and a model card."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aserve.models.eagle_spec import CAPTURED, HeadSpec, Method, default_captured
from aserve.models.spec import Fields, ModelSpec, decoder_spec
from aserve.training.acceptance import Measured
from aserve.training.files import save_tensors, write_whole
from aserve.training.network import Weights

PREFIXES: dict[Method, str] = {"eagle": "layers.0.", "eagle3": "midlayer."}


def head_config(target: ModelSpec, method: Method, draft_vocab: int, inner: int) -> dict[str, Any]:
    """A config.json as SafeAILab/EAGLE and SpecForge write them."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM" if method == "eagle" else "LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": target.eps,
        "rope_theta": target.rope["rope_theta"],
        "max_position_embeddings": target.context_len,
        "vocab_size": target.vocab,
        "tie_word_embeddings": False,
        "bos_token_id": target.bos_id,
        "eos_token_id": list(target.eos_ids),
        "torch_dtype": "bfloat16",
    }
    if method == "eagle":
        return config | {"bias": False}
    captured = {CAPTURED: list(default_captured(target.layers)), "use_aux_hidden_state": True}
    return config | {
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target.hidden,
        "eagle_config": captured,
    }


def spec_for(config: Mapping[str, Any], target: ModelSpec, method: Method) -> HeadSpec:
    """Of a head with this config that is to be trained."""
    extra = {"window": None}
    layers = decoder_spec("draft head", Fields(config), torch.bfloat16, extra)
    return HeadSpec(
        method=method,
        layers=layers,
        prefix=PREFIXES[method],
        target_hidden=target.hidden,
        captured=default_captured(target.layers) if method == "eagle3" else (),
        draft_vocab=config.get("draft_vocab_size", target.vocab),
        has_table=False,
        has_map=method == "eagle3",
        fc_bias=False,
    )


def save_head(
    folder: pathlib.Path, config: Mapping[str, Any], weights: Weights, ids_D: Tensor | None
) -> int:
    """bfloat16; the embedding is left to the target. How many bytes the weights take."""
    tensors = {name: w.detach().to(torch.bfloat16) for name, w in weights.items()}
    if ids_D is not None:
        tensors["d2t"] = ids_D - torch.arange(len(ids_D))
        is_drafted = torch.zeros(config["vocab_size"], dtype=torch.bool)
        tensors["t2d"] = is_drafted.index_fill(0, ids_D, True)
    save_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    write_whole(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())
    return (folder / "model.safetensors").stat().st_size


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What a card says; `measured[group][shape]`."""

    target: str
    method: Method
    command: str
    data: str
    training: str
    size_bytes: int
    measured: Mapping[str, Mapping[str, Measured]]


NAMES: dict[Method, str] = {"eagle": "EAGLE (as of EAGLE-1 and -2)", "eagle3": "EAGLE-3"}


def card(facts: Facts) -> str:
    """README.md."""
    shapes = list(next(iter(facts.measured.values())))
    rows = [
        f"| {group} | " + " | ".join(f"{found[shape].per_step:.2f}" for shape in shapes) + " |"
        for group, found in facts.measured.items()
    ]
    return "\n".join(
        [
            f"# {NAMES[facts.method]} draft head for {facts.target}",
            "",
            f"Made by `{facts.command}`. {facts.size_bytes / 1e6:.1f} MB in bfloat16, in the",
            "layout of SafeAILab/EAGLE and SpecForge; the embedding is the target's.",
            "",
            f"Data: {facts.data}",
            "",
            f"Training: {facts.training}",
            "",
            "Tokens per step of the target, greedy, the bonus token included, on conversations",
            "that were held out:",
            "",
            "| | " + " | ".join(shapes) + " |",
            "|---" * (len(shapes) + 1) + "|",
            *rows,
            "",
        ]
    )
