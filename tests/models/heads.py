"""Random draft heads in the public layouts, and what they compute, from the papers' description.

Plain float32 over whole sequences, without pages, caches or anything of aserve.
"""

import json
import pathlib
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from tests.models.families import PLAIN, VOCAB

HIDDEN, HEADS, KV_HEADS, DIM, INNER = 64, 4, 2, 16, 96
DRAFT_VOCAB = 48
EPS = 1e-5
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": PLAIN["rope_theta"],
    "vocab_size": VOCAB,
}
Tensors = dict[str, Tensor]


def _noise(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            found[name] = 1 + 0.2 * noise
        else:
            found[name] = noise * (0.3 if len(shape) == 1 else 1.2 * shape[-1] ** -0.5)
    return found


def _layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    at, kv = f"{prefix}self_attn.", KV_HEADS * DIM
    return {
        f"{at}q_proj.weight": (HEADS * DIM, width),
        f"{at}k_proj.weight": (kv, width),
        f"{at}v_proj.weight": (kv, width),
        f"{at}o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER),
    }


def write(folder: pathlib.Path, config: dict[str, Any], tensors: Tensors) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(
        {k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors"
    )
    return folder


def eagle(
    layers: int = 1, bias: bool = True, table: bool = False, vocab: int = VOCAB
) -> tuple[dict[str, Any], Tensors]:
    """(config, tensors) of an EAGLE-1/2 head."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    if bias:
        shapes["fc.bias"] = (HIDDEN,)
    if table:
        shapes["embed_tokens.weight"] = (vocab, HIDDEN)
    for layer in range(layers):
        shapes |= _layer(f"layers.{layer}.", HIDDEN)
        if layer:
            shapes[f"layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
    config = CONFIG | {"num_hidden_layers": layers, "bias": bias, "vocab_size": vocab}
    return config, _noise(shapes, 1)


def eagle3(
    target_layers: tuple[int, ...] = (0, 1, 2), prefix: str = "midlayer.", vocab: int = VOCAB
) -> tuple[dict[str, Any], Tensors]:
    """(config, tensors) of an EAGLE-3 head with a reduced vocabulary."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(target_layers) * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        f"{prefix}hidden_norm.weight": (HIDDEN,),
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        **_layer(prefix, 2 * HIDDEN),
    }
    tensors = _noise(shapes, 2)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(vocab, generator=generator)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    config = CONFIG | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(target_layers)},
    }
    return config, tensors


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x_THD: Tensor, positions_T: Tensor) -> Tensor:
    half = DIM // 2
    inverse = PLAIN["rope_theta"] ** (-torch.arange(half) / half)
    angle = positions_T[:, None, None] * inverse
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def attention(w: Tensors, at: str, x: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
    """`sees[i, j]`: whether row i sees row j."""

    def heads(name: str, n: int) -> Tensor:
        return (x @ w[f"{at}{name}_proj.weight"].T).view(len(x), n, DIM)

    q = rotate(heads("q", HEADS), positions)
    k = rotate(heads("k", KV_HEADS), positions).repeat_interleave(HEADS // KV_HEADS, 1)
    v = heads("v", KV_HEADS).repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
    weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
    out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
    return out @ w[f"{at}o_proj.weight"].T


def mlp(w: Tensors, prefix: str, x: Tensor) -> Tensor:
    x = rms(x, w[f"{prefix}post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(x @ w[f"{prefix}mlp.gate_proj.weight"].T)
    return (gate * (x @ w[f"{prefix}mlp.up_proj.weight"].T)) @ w[f"{prefix}mlp.down_proj.weight"].T


def eagle_rows(
    w: Tensors, embedded: Tensor, hidden: Tensor, where: tuple[Tensor, Tensor]
) -> Tensor:
    """h' of every row; `where` is (positions, who sees whom)."""
    x = torch.cat((embedded, hidden), -1) @ w["fc.weight"].T + w.get("fc.bias", 0)
    layer = 0
    while (prefix := f"layers.{layer}.") + "mlp.up_proj.weight" in w:
        into = rms(x, w[f"{prefix}input_layernorm.weight"]) if layer else x
        x = x + attention(w, f"{prefix}self_attn.", into, *where)
        x = x + mlp(w, prefix, x)
        layer += 1
    return x


def eagle3_rows(
    w: Tensors, embedded: Tensor, hidden: Tensor, where: tuple[Tensor, Tensor]
) -> Tensor:
    """The layer's output of every row, before the norm."""
    prefix = next(name for name in w if name.endswith("hidden_norm.weight"))[:-18]
    both = (
        rms(embedded, w[f"{prefix}input_layernorm.weight"]),
        rms(hidden, w[f"{prefix}hidden_norm.weight"]),
    )
    x = hidden + attention(w, f"{prefix}self_attn.", torch.cat(both, -1), *where)
    return x + mlp(w, prefix, x)
