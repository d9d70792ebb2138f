"""Whole steps of a model of SmolLM2's shape with random weights, as a rank runs them: embedding,
all layers, head, a greedy draw. The twin goes operation by operation, in native ones too.

What a step costs over its floor, and what verifying more rows of one sequence costs over one.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aserve.bench import attention_cases, case
from aserve.bench.attention_cases import Rows
from aserve.bench.case import FORMAT_BYTES, Case
from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.core.message import Sampling
from aserve.models.fused import fuse
from aserve.models.registry import ARCHITECTURES, Model
from aserve.models.spec import Fields, decoder_spec
from aserve.models.split import Split
from aserve.models.weights.loader import Matrix, RowParallel
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Linear, Ops
from aserve.tensor.sampler import History, NativeSampler, SampleRow
from aserve.tensor.tokens import Seat, Tokens

# The formats of layers and head: the packaged GGUF's own, and bfloat16 throughout.
FORMATS = {"q4m": ("q4m", "q8"), "bf16": ("bf16", "bf16")}
KV_LEN = 192  # half way through 128 tokens in and 128 out
STREAMS = (1, 8, 32)
VERIFIED = {4: 1.25, 8: 1.5}  # rows of one sequence: the bar over one row
FLOOR_BAR = 2.0  # at one stream (bytes) and at 32 (operations)
FLOOR_BAR_STREAMS = (1, 32)
DRAWN = Sampling(temperature=0.0)


class RandomWeights:
    """`Weights` that are made, not read; counts their bytes, and the products of a row."""

    def __init__(self, ops: Ops, layers: str, head: str) -> None:
        self.ops, self.layers, self.head = ops, layers, head
        self.nbytes = self.products = 0.0

    def linear(self, *parts: Matrix) -> Linear:
        return self._made(*parts)

    def row_parallel(self, part: Matrix, row_blocks: int) -> RowParallel:
        return RowParallel(self._made(part, row_blocks=row_blocks), None, False)

    def vector(self, name: str, n: int) -> Tensor:
        return torch.ones(n)

    def table(self, name: str, rows: int, columns: int, split: Split) -> Tensor:
        raise AssertionError("the table is the head's")

    def held(self, split: Split, length: int) -> range:
        return range(length)

    def _made(self, *parts: Matrix, row_blocks: int = 1) -> Linear:
        n, k = sum(part.n for part in parts), parts[0].k
        form = self.head if n == case.VOCAB else self.layers
        self.nbytes += n * k * FORMAT_BYTES[form]
        self.products += n * k
        return case.packed(self.ops, form, n, k, row_blocks)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model with what its floor is made of."""

    model: Model
    nbytes: float
    products: float  # multiplications of a row


def config() -> dict[str, object]:
    return {
        "hidden_size": case.HIDDEN,
        "intermediate_size": case.FFN,
        "num_hidden_layers": case.LAYERS,
        "num_attention_heads": case.HEADS,
        "num_key_value_heads": case.KV_HEADS,
        "head_dim": case.HEAD_DIM,
        "vocab_size": case.VOCAB,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
    }


def model_of(ops: NativeOps, form: str) -> Whole:
    arch = "LlamaForCausalLM"
    family, fields = ARCHITECTURES[arch], Fields(config())
    spec = decoder_spec(arch, fields, torch.bfloat16, family.fields_of(fields))
    weights = RandomWeights(ops, *FORMATS[form])
    model = Model(spec, weights, ops, family.mlp_of, Grid(Layout()), 0)
    fuse(model)
    return Whole(model, weights.nbytes, weights.products)


def step_call(whole: Whole, ops: NativeOps, shape: Rows) -> Callable[[bool], Callable[[], object]]:
    """`call(is_plain)` gives what runs the step; the layers have a KV pool each."""
    model = whole.model
    n_rows = shape.sequences * shape.rows
    seat = Seat(model.grid, model.rank, None, ops)
    tokens = Tokens(seat, [[shape.rows] * shape.sequences])
    kv = attention_cases.pools_for(shape, len(model.layers))
    attend = attention_cases.step_of(shape)
    ids = torch.randint(0, case.VOCAB, (n_rows,))
    sampler = NativeSampler(ops.team)
    drawn = [SampleRow(History(DRAWN, [1, 2, 3], 3), 3) for _ in range(n_rows)]

    def run(is_plain: bool) -> object:
        through = model.through
        model.through = model.one_by_one if is_plain else through
        hidden = model.forward(ids, tokens, kv, attend)
        model.through = through
        return sampler.sample(model.logits(hidden, (n_rows,), seat), drawn)

    return lambda is_plain: lambda: run(is_plain)


def floor_of(whole: Whole, shape: Rows) -> tuple[float, float]:
    """Bytes and operations: every weight once, the KV of every layer, products with both."""
    rows, layers = shape.sequences * shape.rows, case.LAYERS
    attended = 4 * attention_cases.seen_keys(shape) * case.HEADS * case.HEAD_DIM
    moved = whole.nbytes + layers * attention_cases.kv_bytes(shape)
    return moved, 2 * rows * whole.products + layers * attended


def step(ops: NativeOps) -> Iterator[Case]:
    for form in FORMATS:
        whole = model_of(ops, form)
        for streams in STREAMS:
            shape = Rows(streams, 1, KV_LEN)
            call = step_call(whole, ops, shape)
            moved, operations = floor_of(whole, shape)
            yield Case(
                "step",
                f"{form}, {streams} streams, kv {KV_LEN}",
                moved,
                operations,
                native=call(False),
                twin=call(True),
                span=moved,
                bar=FLOOR_BAR if streams in FLOOR_BAR_STREAMS else None,
            )


def verify(ops: NativeOps) -> Iterator[Case]:
    for form in FORMATS:
        whole = model_of(ops, form)
        one = step_call(whole, ops, Rows(1, 1, KV_LEN))
        for rows, bar in VERIFIED.items():
            shape = Rows(1, rows, KV_LEN)
            call = step_call(whole, ops, shape)
            moved, operations = floor_of(whole, shape)
            yield Case(
                "verify",
                f"{form}, {rows} rows of one sequence",
                moved,
                operations,
                native=call(False),
                twin=call(True),
                span=moved,
                base=one(False),
                bar=bar,
            )
