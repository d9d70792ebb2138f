"""The arithmetic of draft heads again, for whole batches and with gradients; one layer, no biases.

Weights are a dict by their names in the public layouts, so what is trained is what is saved. The
formulas are those of aserve/models/eagle.py and eagle3.py.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from aserve.models.eagle_spec import HeadSpec
from aserve.tensor.rope import inv_freq

Weights = dict[str, Tensor]
SMALL = 0.1  # of projections that add to the residual stream, at first


class Network:
    """`table_VH` is the target's embedding; it is not trained."""

    def __init__(self, spec: HeadSpec, table_VH: Tensor) -> None:
        self.spec, self.table = spec, table_VH
        layers = spec.layers
        self.frequencies, self.factor = inv_freq(layers.rope, layers.head_dim)
        self.at, self.eps = spec.prefix, layers.eps
        self.groups, self.dim = layers.kv_heads, layers.head_dim
        self.each = layers.heads // layers.kv_heads  # query heads of a KV head

    def start(self, w: Weights, features: Tensor) -> Tensor:
        """As `DraftHead.start`."""
        if self.spec.method == "eagle":
            return features.float()
        return functional.linear(features.float(), w["fc.weight"]).float()

    def unroll(self, w: Weights, ids_BT: Tensor, features: Tensor, steps: int) -> Iterator[Tensor]:
        """Training-time test (Li et al. 2025): [B, T, H] of each of `steps` steps.

        Row t of step 0 is the pair of what the target had at t and token t + 1, `ids_BT[:, t]`. In
        step j the row is the head's own of step j - 1 with the token j places on; it sees the rows
        of step 0 up to t and of each later step its own, as a chain does that was accepted so far.
        """
        hidden = self.start(w, features)
        keys: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            ids = functional.pad(ids_BT[:, step:], (0, step))
            residual, into = self._enter(w, ids, hidden)
            q, k, v = self._project(w, into, step)
            keys.append((k, v))
            hidden = self._leave(w, residual, self._attend(q, keys))
            yield hidden

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], weight, self.eps)

    def _enter(self, w: Weights, ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the residual stream, what goes into the attention)."""
        embedded = functional.embedding(ids, self.table).float()
        if self.spec.method == "eagle":
            x = functional.linear(torch.cat((embedded, hidden), -1), w["fc.weight"]).float()
            return x, x
        both = (
            self.norm(embedded, w[f"{self.at}input_layernorm.weight"]),
            self.norm(hidden, w[f"{self.at}hidden_norm.weight"]),
        )
        return hidden, torch.cat(both, -1)

    def _project(self, w: Weights, into: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, G, R, T, D]; k and v [B, G, T, D]."""
        batch, rows, _ = into.shape
        at = f"{self.at}self_attn."
        q, k, v = (functional.linear(into, w[f"{at}{name}_proj.weight"]) for name in "qkv")
        angles = torch.arange(step, step + rows).float()[:, None] * self.frequencies
        cos, sin = (angles.cos() * self.factor, angles.sin() * self.factor)
        q = q.view(batch, rows, self.groups, self.each, self.dim).permute(0, 2, 3, 1, 4)
        k = k.view(batch, rows, self.groups, self.dim).transpose(1, 2)
        v = v.view(batch, rows, self.groups, self.dim).transpose(1, 2)
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def _attend(self, q: Tensor, keys: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, T, heads * D]."""
        batch, groups, each, rows, dim = q.shape
        k, v = keys[0]
        scores = q.flatten(2, 3) @ k.transpose(-1, -2)
        scores = scores.view(batch, groups, each, rows, rows).float()
        later = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        own = [(q * k_own[:, :, None]).sum(-1, keepdim=True).float() for k_own, _ in keys[1:]]
        weights = (torch.cat([scores, *own], -1) * dim**-0.5).softmax(-1)
        out = (weights[..., :rows].flatten(2, 3).to(v.dtype) @ v).view(q.shape).float()
        for number, (_, v_own) in enumerate(keys[1:]):
            out = out + weights[..., rows + number, None] * v_own[:, :, None]
        return out.permute(0, 3, 1, 2, 4).reshape(batch, rows, groups * each * dim)

    def _leave(self, w: Weights, residual: Tensor, attended: Tensor) -> Tensor:
        at = f"{self.at}mlp."
        x = residual + functional.linear(attended, w[f"{self.at}self_attn.o_proj.weight"])
        normed = self.norm(x, w[f"{self.at}post_attention_layernorm.weight"])
        gate = functional.silu(functional.linear(normed, w[f"{at}gate_proj.weight"]))
        inner = gate * functional.linear(normed, w[f"{at}up_proj.weight"])
        return x + functional.linear(inner, w[f"{at}down_proj.weight"])

    def logits(self, w: Weights, hidden: Tensor, head_VH: Tensor) -> Tensor:
        """Of the head's own vocabulary; `head_VH` is the target's, for EAGLE."""
        if self.spec.method == "eagle":
            return functional.linear(hidden.to(head_VH.dtype), head_VH).float()
        return functional.linear(self.norm(hidden, w["norm.weight"]), w["lm_head.weight"]).float()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs of the last dimension, the rest of it as it is."""
    half = cos.shape[-1]
    x = x.float()
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def first_weights(
    spec: HeadSpec, norm_H: Tensor, head_rows: Tensor, generator: torch.Generator
) -> Weights:
    """Where training starts: a head that repeats what the target has last.

    fc lets the highest feature through, norm and output rows are the target's, and what adds to
    the stream is small. A random head takes most of a short training to get there.
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
    if spec.method == "eagle":
        w["fc.weight"] = torch.cat((random(hidden, hidden, SMALL), torch.eye(hidden)), 1)
        return w
    fc = torch.zeros(hidden, spec.feature_len)
    fc[:, -spec.target_hidden :] = torch.eye(hidden, spec.target_hidden)
    w["fc.weight"] = fc
    w[f"{at}input_layernorm.weight"] = torch.ones(hidden)
    w[f"{at}hidden_norm.weight"] = torch.ones(hidden)
    w["norm.weight"] = norm_H.float().clone()
    w["lm_head.weight"] = head_rows.float().clone()
    return w
