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


class Network:
    """`table_VH` is the target's embedding; it is not trained."""

    def __init__(self, spec: HeadSpec, table_VH: Tensor) -> None:
        self.spec, self.table = spec, table_VH
        layers = spec.layers
        self.frequencies, self.factor = inv_freq(layers.rope, layers.head_dim)
        self.at, self.eps = spec.prefix, layers.eps
        self.dim = layers.head_dim

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
        """q [B, heads, T, D]; k and v [B, KV heads, T, D]."""
        batch, rows, _ = into.shape
        at = f"{self.at}self_attn."
        q, k, v = (
            functional.linear(into, w[f"{at}{name}_proj.weight"])
            .view(batch, rows, -1, self.dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        angles = torch.arange(step, step + rows).float()[:, None] * self.frequencies
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def _attend(self, q: Tensor, keys: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, T, heads * D]. Keys of all steps one after the other: of the first a row sees those
        up to its own place, of each later one its own. The few that are seen of those cost less
        than scores that somebody has to keep."""
        rows = q.shape[2]
        seen = torch.ones(rows, rows, dtype=torch.bool)
        sees = torch.cat([seen.tril(), *(seen.tril() & seen.triu() for _ in keys[1:])], 1)
        k, v = (torch.cat(parts, 2) for parts in zip(*keys, strict=True))
        out = functional.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), attn_mask=sees, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

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
        return functional.linear(self.said(w, hidden), w["lm_head.weight"]).float()

    def said(self, w: Weights, hidden: Tensor) -> Tensor:
        """What the output rows of an EAGLE-3 head are multiplied with."""
        return self.norm(hidden, w["norm.weight"])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split pairs of the last dimension, the rest of it as it is."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin, rest.float()), -1)
    return turned.to(x.dtype)
