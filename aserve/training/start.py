"""Where training begins: a head that repeats what the target has last, for it has the same ends."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from aserve.models.eagle_spec import HeadSpec
from aserve.models.spec import ModelSpec
from aserve.models.weights.source import Source
from aserve.training.network import Weights

SMALL = 0.1  # of projections that add to the residual stream, at first
Start = Literal["plain", "last-layer"]
STARTS: tuple[Start, ...] = ("plain", "last-layer")
MATRICES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
VECTORS = ("input_layernorm", "post_attention_layernorm")


@dataclasses.dataclass(frozen=True, slots=True)
class Ends:
    """What a head begins with of its target: the final norm, output rows of the head's vocabulary,
    and its last layer by the names inside that, if it is to begin with it."""

    norm_H: Tensor
    head_VH: Tensor
    last: Mapping[str, Tensor] | None = None


def last_layer(source: Source, spec: ModelSpec) -> dict[str, Tensor] | None:
    """float32; None where the target's layers are of another make than a head's."""
    at = f"model.layers.{spec.layers - 1}."
    names = [f"{name}.weight" for name in (*MATRICES, *VECTORS)]
    if spec.qk_norm or any(at + name not in source.entries for name in names):
        return None
    found = {}
    for name in names:
        index = tuple(slice(0, length) for length in source.entries[at + name].shape)
        found[name] = source.read(at + name, index, torch.float32).clone()
    return found


def first_weights(spec: HeadSpec, ends: Ends, generator: torch.Generator) -> Weights:
    """In float32, by the names of the public layouts.

    fc lets the highest feature through, norm and output rows are the target's. Its last layer as
    the head's is a better beginning than a random one whose output is small (SmolLM2, 44 steps: a
    loss of 14.2 against 19.7).
    """
    layers, hidden = spec.layers, spec.layers.hidden
    q_len, kv_len = layers.heads * layers.head_dim, layers.kv_heads * layers.head_dim
    wide = hidden if spec.method == "eagle" else 2 * hidden

    def random(n: int, k: int, scale: float = 1.0) -> Tensor:
        return (torch.rand(n, k, generator=generator) * 2 - 1) * (scale * k**-0.5)

    at = spec.prefix
    w = {
        f"{at}self_attn.q_proj.weight": random(q_len, wide),
        f"{at}self_attn.k_proj.weight": random(kv_len, wide),
        f"{at}self_attn.v_proj.weight": random(kv_len, wide),
        f"{at}self_attn.o_proj.weight": random(hidden, q_len, SMALL),
        f"{at}mlp.gate_proj.weight": random(layers.inner, hidden),
        f"{at}mlp.up_proj.weight": random(layers.inner, hidden),
        f"{at}mlp.down_proj.weight": random(hidden, layers.inner, SMALL),
        f"{at}post_attention_layernorm.weight": torch.ones(hidden),
    }
    if ends.last is not None:
        w |= _of_layer(spec, ends.last, w)
    if spec.method == "eagle":
        w["fc.weight"] = torch.cat((random(hidden, hidden, SMALL), torch.eye(hidden)), 1)
        return w
    fc = torch.zeros(hidden, spec.feature_len)
    fc[:, -spec.target_hidden :] = torch.eye(hidden, spec.target_hidden)
    w["fc.weight"] = fc
    w[f"{at}input_layernorm.weight"] = torch.ones(hidden)
    last = ends.last or {"input_layernorm.weight": torch.ones(hidden)}
    w[f"{at}hidden_norm.weight"] = last["input_layernorm.weight"].clone()
    w["norm.weight"] = ends.norm_H.float().clone()
    w["lm_head.weight"] = ends.head_VH.float().clone()
    return w


def _of_layer(spec: HeadSpec, last: Mapping[str, Tensor], random: Weights) -> Weights:
    """The target's last layer as that of the head, as far as their shapes agree. The half of an
    EAGLE-3 attention that takes embeddings stays random and small."""
    found = {}
    for name in (*(f"{one}.weight" for one in MATRICES), "post_attention_layernorm.weight"):
        ours, theirs = random[spec.prefix + name], last[name]
        if ours.shape == theirs.shape:
            found[spec.prefix + name] = theirs
        elif ours.ndim == 2 and ours.shape[1] == 2 * theirs.shape[1]:
            half = ours[:, : theirs.shape[1]] * SMALL
            found[spec.prefix + name] = torch.cat((half, theirs), 1)
    return found
