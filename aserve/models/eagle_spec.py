"""What a draft head of the EAGLE family is, what it needs of its target, and whether they fit.

Checkpoints as SafeAILab/EAGLE (EAGLE-1, -2 and -3) and SpecForge write them. What a head computes
is in eagle.py and eagle3.py.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from aserve.core.message import Drafting
from aserve.core.tree import Draft
from aserve.errors import ModelError
from aserve.models import dense
from aserve.models.decoder import Ends, Rotary
from aserve.models.regions import Region
from aserve.models.spec import Fields, ModelSpec, decoder_spec
from aserve.models.weights.loader import Matrix, RowParallel, Weights
from aserve.models.weights.source import Entry
from aserve.tensor.blocks import DraftRoots
from aserve.tensor.ops import Attend, KvLayer, Linear

Method = Literal["eagle", "eagle3"]
EMBEDDING, FC = "embed_tokens.weight", "fc.weight"
CAPTURED = "eagle_aux_hidden_state_layer_ids"


@dataclasses.dataclass(frozen=True, slots=True)
class HeadSpec:
    """`layers` is the head's own decoder; `prefix` is what its first layer is called.

    `captured` are the target's layers whose input rows are its features, side by side; empty: its
    rows after the final norm. The head gives logits of `draft_vocab` tokens.
    """

    method: Method
    layers: ModelSpec
    prefix: str
    target_hidden: int
    captured: tuple[int, ...]
    draft_vocab: int
    has_table: bool
    has_map: bool
    fc_bias: bool

    @property
    def feature_len(self) -> int:
        """Columns of a row of features."""
        return self.target_hidden * max(1, len(self.captured))


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What a head takes from its target, whole: the embedding and, for EAGLE, the output head."""

    spec: ModelSpec
    table: Tensor | Linear
    head: Linear


class Growing(Protocol):
    def grow(self, kv: KvLayer, rotary: Rotary, roots: DraftRoots, size: Drafting) -> list[Draft]:
        """Below N roots, as `aserve.runner.growing.grow` would."""
        ...


class DraftHead(Protocol):
    """A head in memory. One row of it is a pair: what the target (or the head itself) had at
    position p, and the token at p + 1. Its KV stands at p."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def fused(self) -> "Growing | None":
        """What grows trees in one call, where blocks come with the operations and it is of one
        layer."""
        ...

    @property
    def rotary(self) -> Rotary: ...

    @property
    def nbytes(self) -> int:
        """Of weights in memory, those of the target left out."""
        ...

    def regions(self) -> tuple[Region, ...]:
        """Its KV: a layer or more of its own, the same on every rank that drafts."""
        ...

    def start(self, features_TF: Tensor) -> Tensor:
        """[T, H]: what stands for the hidden rows where the target has been."""
        ...

    def forward(
        self, ids_T: Tensor, hidden_TH: Tensor, kv: Sequence[KvLayer], attend: Attend
    ) -> Tensor:
        """float32 [T, H], of which `logits` are made, and which is `hidden_TH` of the next token.

        `ids_T` (int64) are the tokens at `attend.positions_T` + 1, `hidden_TH` from `start` or
        from here.
        """
        ...

    def draft(
        self,
        ids_T: Tensor,
        hidden_TH: Tensor,
        kv: Sequence[KvLayer],
        attend: Attend,
        ends: Ends | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(`forward`, its `logits`), of the rows of `ends` if there are any; KV is written of all.
        In one call, with the same bits, where blocks come with the operations."""
        ...

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """float32 [T, draft vocabulary]: of the tokens two places after the position of a row."""
        ...

    def token_ids(self, drafted: Tensor) -> Tensor:
        """int64 ids of the target for ids of the draft vocabulary, of any shape."""
        ...


class Renamed:
    """`Weights` for blocks that call their parameters `inside`..., which the file calls
    `outside`..."""

    def __init__(self, weights: Weights, inside: str, outside: str) -> None:
        self._weights, self._inside, self._outside = weights, inside, outside

    def _name(self, name: str) -> str:
        if name.startswith(self._inside):
            return self._outside + name[len(self._inside) :]
        return name

    def linear(self, *parts: Matrix) -> Linear:
        named = [dataclasses.replace(part, name=self._name(part.name)) for part in parts]
        return self._weights.linear(*named)

    def row_parallel(self, part: Matrix, row_blocks: int) -> RowParallel:
        named = dataclasses.replace(part, name=self._name(part.name))
        return self._weights.row_parallel(named, row_blocks)

    def vector(self, name: str, n: int) -> Tensor:
        return self._weights.vector(self._name(name), n)

    def table(self, name: str, rows: int, columns: int, split: Any) -> Tensor | Linear:
        return self._weights.table(self._name(name), rows, columns, split)

    def held(self, split: Any, length: int) -> range:
        return self._weights.held(split, length)


def default_captured(layers: int) -> tuple[int, int, int]:
    """Low, middle and high, as EAGLE-3 was published; nearer together in a model of few layers."""
    low, middle, high = 2, layers // 2, layers - 3
    last = layers - 1
    return min(low, last), min(middle, last), max(high, min(middle, last))


def read_spec(
    config: Mapping[str, Any], entries: Mapping[str, Entry], target: ModelSpec, origin: str
) -> HeadSpec:
    """Raises ModelError with everything in which this head does not fit `target`."""
    prefix = next((p for p in ("midlayer.", "layers.0.") if _has(entries, p)), None)
    if prefix is None or FC not in entries:
        raise ModelError(
            f"{origin} is no EAGLE head: it needs fc.weight and layers.0.* (EAGLE) or midlayer.* "
            "(EAGLE-3)"
        )
    method: Method = "eagle3" if f"{prefix}hidden_norm.weight" in entries else "eagle"
    fields = Fields({"num_hidden_layers": 1, **config})
    found: list[str] = []
    at = f"{prefix}self_attn."
    extra = {
        "window": None,
        "qkv_bias": f"{at}q_proj.bias" in entries,
        "out_bias": f"{at}o_proj.bias" in entries,
        "mlp_bias": f"{prefix}mlp.down_proj.bias" in entries,
        "qk_norm": f"{at}q_norm.weight" in entries,
    }
    layers = decoder_spec("draft head", fields, target.dtype, extra)
    spec = HeadSpec(
        method=method,
        layers=layers,
        prefix=prefix,
        target_hidden=fields.count("target_hidden_size", target.hidden),
        captured=_captured(fields, target) if method == "eagle3" else (),
        draft_vocab=fields.count("draft_vocab_size", layers.vocab),
        has_table=EMBEDDING in entries,
        has_map="d2t" in entries,
        fc_bias="fc.bias" in entries,
    )
    found += fields.findings
    found += misfits(spec, entries, target)
    if config.get("norm_output") or config.get("fc_norm"):
        found.append("it normalises its features or its output, which is not supported")
    if found:
        raise ModelError([f"the draft head {origin} does not fit its target:", *found])
    return spec


def _has(entries: Mapping[str, Entry], prefix: str) -> bool:
    return f"{prefix}self_attn.q_proj.weight" in entries


def _captured(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    given = fields.config.get("eagle_config") or {}
    ids = given.get(CAPTURED) if isinstance(given, Mapping) else given
    if ids is None:
        return default_captured(target.layers)
    whole = isinstance(ids, list) and len(ids) > 0
    if not whole or any(type(one) is not int or one < 0 for one in ids):
        fields.findings.append(f"{CAPTURED} is {ids!r}: a list of layers is needed")
        return default_captured(target.layers)
    return tuple(ids)


def misfits(spec: HeadSpec, entries: Mapping[str, Entry], target: ModelSpec) -> list[str]:
    """Everything that is wrong between them, each with both values."""
    found = []
    hidden, layers = spec.layers.hidden, spec.layers
    if spec.target_hidden != target.hidden:
        found.append(
            f"it was made for a target of hidden size {spec.target_hidden}, this one has "
            f"{target.hidden}"
        )
    elif hidden != target.hidden and (spec.method == "eagle" or not spec.has_table):
        found.append(f"its hidden size is {hidden}, the target's is {target.hidden}")
    if layers.vocab != target.vocab:
        found.append(
            f"it was made for a vocabulary of {layers.vocab} tokens, the target has {target.vocab}"
        )
    if spec.draft_vocab > layers.vocab or (
        spec.method == "eagle3" and not spec.has_map and spec.draft_vocab != layers.vocab
    ):
        found.append(
            f"it drafts of {spec.draft_vocab} tokens out of {layers.vocab}, without a d2t that "
            "says which"
        )
    if spec.method == "eagle3" and layers.layers != 1:
        found.append(f"it has {layers.layers} layers; EAGLE-3 heads have 1")
    if beyond := [layer for layer in spec.captured if layer >= target.layers]:
        found.append(f"it takes what enters layers {beyond}, the target has {target.layers}")
    columns = entries[FC].shape[-1]
    wide = spec.feature_len if spec.method == "eagle3" else 2 * hidden
    if not found and columns != wide:
        found.append(f"its fc takes {columns} columns, the target gives {wide}")
    return found


def checked_map(d2t: Tensor, target_vocab: int, origin: str) -> Tensor:
    """int64 ids of the target for each draft id, from their offsets. Raises ModelError."""
    ids = torch.arange(len(d2t), dtype=torch.int64) + d2t
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < target_vocab):
        raise ModelError(
            f"{origin}: d2t leads to tokens {int(ids.min())} to {int(ids.max())}, the target has "
            f"{target_vocab}"
        )
    if len(ids.unique()) != len(ids):
        raise ModelError(f"{origin}: d2t leads to a token twice")
    return ids


mlp_of = dense.mlp_of
