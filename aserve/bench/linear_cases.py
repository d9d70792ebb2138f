"""Linears in every format that weights are kept in, their row blocks, and gated pairs."""

from collections.abc import Iterator
from itertools import cycle

import torch

from aserve.bench import case
from aserve.bench.case import FFN, FORMAT_BYTES, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, Case, packed
from aserve.tensor.blocks import MlpPart, blocks_of
from aserve.tensor.native import NativeOps
from aserve.tensor.reference import ReferenceOps

ROW_COUNTS = (1, 4, 8, 32, 128, 512)
HEAD_ROWS_MAX = 32
ROW_BLOCKS = 3  # of a row-parallel linear: what 3 ranks hold one each of
FORMATS = ("q4m", "q8", "bf16")
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (case.VOCAB, HIDDEN),
}


def linear(ops: NativeOps) -> Iterator[Case]:
    """Beside torch where it has the format."""
    twin = ReferenceOps()
    for form in FORMATS:
        for name, (n, k) in LINEARS.items():
            weight_bytes = n * k * FORMAT_BYTES[form]
            copies = case.copies(weight_bytes)
            weights = cycle([packed(ops, form, n, k) for _ in range(copies)])
            reference = packed(twin, form, n, k)
            plain = None
            if form == "bf16":
                plain = cycle([torch.randn(n, k).bfloat16() for _ in range(copies)])
            for rows in ROW_COUNTS:
                if name == "head" and rows > HEAD_ROWS_MAX:
                    continue
                x = torch.randn(rows, k)
                x_bf16 = x.bfloat16()
                yield Case(
                    "linear",
                    f"{form} {name} {rows}x{k} -> {n}",
                    moved=weight_bytes + rows * (k + n) * 4,
                    ops=2 * rows * n * k,
                    native=lambda x=x, weights=weights: ops.linear(x, next(weights)),
                    twin=lambda x=x, reference=reference: twin.linear(x, reference),
                    torch=plain
                    and (lambda x=x_bf16, plain=plain: torch.nn.functional.linear(x, next(plain))),
                    span=copies * weight_bytes,
                )


def linear_parts(ops: NativeOps) -> Iterator[Case]:
    """The row-parallel linears with three blocks; beside them `linear`, which adds them up."""
    twin = ReferenceOps()
    for name, n, k in (("o", HIDDEN, HEADS * HEAD_DIM), ("down", HIDDEN, FFN)):
        copies = case.copies(n * k * 2)
        weights = cycle([packed(ops, "bf16", n, k, ROW_BLOCKS) for _ in range(copies)])
        reference = packed(twin, "bf16", n, k, ROW_BLOCKS)
        for rows in (1, 32, 512):
            x = torch.randn(rows, k)
            for what, width in (("parts", ROW_BLOCKS * n), ("sum", n)):
                call = "linear_parts" if what == "parts" else "linear"
                yield Case(
                    "linear_parts",
                    f"{name} {rows}x{k} -> {n}, {what}",
                    moved=n * k * 2 + rows * (k + width) * 4,
                    ops=2 * rows * n * k,
                    native=lambda x=x, weights=weights, call=call: getattr(ops, call)(
                        x, next(weights)
                    ),
                    twin=lambda x=x, reference=reference, call=call: getattr(twin, call)(
                        x, reference
                    ),
                    span=copies * n * k * 2,
                )


def gated(ops: NativeOps) -> Iterator[Case]:
    """gate, up, their activation and down in one call; the twin makes three."""
    blocks, twin = blocks_of(ops), ReferenceOps()
    assert blocks is not None
    for form in FORMATS:
        weight_bytes = 3 * FFN * HIDDEN * FORMAT_BYTES[form]
        copies = case.copies(weight_bytes)
        shapes = ((2 * FFN, HIDDEN), (HIDDEN, FFN))
        pairs = [[packed(ops, form, n, k) for n, k in shapes] for _ in range(copies)]
        made = cycle([blocks.mlp(MlpPart(None, up, down, 1e-5)) for up, down in pairs])
        up, down = (packed(twin, form, n, k) for n, k in shapes)
        for rows in ROW_COUNTS:
            x = torch.randn(rows, HIDDEN)
            yield Case(
                "gated",
                f"{form} {rows}x{HIDDEN}, inner {FFN}",
                moved=weight_bytes + 2 * x.nbytes,
                ops=6 * rows * FFN * HIDDEN,
                native=lambda x=x, made=made: next(made).gated(x),
                twin=lambda x=x, up=up, down=down: twin.linear(
                    twin.silu_mul(twin.linear(x, up)), down
                ),
                span=copies * weight_bytes,
            )
