"""What `aserve bench kernels` measures: each native operation at the shapes of SmolLM2-135M.

A case knows the bytes it must move and the operations it must do, so its floor is computed, not
tuned. Weights and KV rotate over several copies, as the layers of a model do.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import get_args

import torch
from torch import Tensor

from aserve.core.message import Sampling
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, CpKind, KvCopy, KvLayer, Ops
from aserve.tensor.reference import ReferenceOps
from aserve.tensor.rope import rope_table
from aserve.tensor.sampler import History, NativeSampler, Sampler, SampleRow, open_sampler

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 576, 9, 3, 64, 1536, 49152
PAGE_SIZE = 16
BLOCKS = 3  # of a row-parallel linear: what 3 ranks hold one each of
WORKING_SET_BYTES = 128 << 20  # beyond what caches keep between two visits to a layer
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "gate_up": (2 * FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "head": (VOCAB, HIDDEN),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one shape. `moved` in bytes and `ops` are the least any kernel could do."""

    kernel: str
    shape: str
    moved: float
    ops: float  # multiplications and additions in bfloat16 products; 0: bound by bytes
    native: Callable[[], object]
    twin: Callable[[], object]
    torch: Callable[[], object] | None = None


def cases(ops: NativeOps, kernels: Sequence[str]) -> Iterator[Case]:
    """Every case of the named kernels, built one at a time."""
    for name in kernels:
        yield from KERNELS[name](ops)


def _linear(ops: NativeOps) -> Iterator[Case]:
    twin = ReferenceOps()
    for name, (n, k) in LINEARS.items():
        copies = max(1, min(30, WORKING_SET_BYTES // (n * k * 2)))
        weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
        packed = cycle([ops.pack(weight) for weight in weights])
        plain = cycle(weights)
        reference = twin.pack(weights[0])
        for rows in (1, 8, 32, 256, 512):
            if name == "head" and rows > 32:
                continue
            x = torch.randn(rows, k)
            x_bf16 = x.bfloat16()
            yield Case(
                "linear",
                f"{name} {rows}x{k} -> {n}",
                moved=n * k * 2 + rows * (k + n) * 4,
                ops=2 * rows * n * k,
                native=lambda x=x, packed=packed: ops.linear(x, next(packed)),
                twin=lambda x=x, reference=reference: twin.linear(x, reference),
                torch=lambda x=x_bf16, plain=plain: torch.nn.functional.linear(x, next(plain)),
            )


def _linear_parts(ops: NativeOps) -> Iterator[Case]:
    """The row-parallel linears with three blocks; beside them `linear`, which adds them up."""
    twin = ReferenceOps()
    for name, n, k in (("o", HIDDEN, HEADS * HEAD_DIM), ("down", HIDDEN, FFN)):
        copies = max(1, min(30, WORKING_SET_BYTES // (n * k * 2)))
        weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
        packed = cycle([ops.pack(weight, row_blocks=BLOCKS) for weight in weights])
        reference = twin.pack(weights[0], row_blocks=BLOCKS)
        for rows in (1, 32, 512):
            x = torch.randn(rows, k)
            for what, width in (("parts", BLOCKS * n), ("sum", n)):
                call = "linear_parts" if what == "parts" else "linear"
                yield Case(
                    "linear_parts",
                    f"{name} {rows}x{k} -> {n}, {what}",
                    moved=n * k * 2 + rows * (k + width) * 4,
                    ops=2 * rows * n * k,
                    native=lambda x=x, packed=packed, call=call: getattr(ops, call)(
                        x, next(packed)
                    ),
                    twin=lambda x=x, reference=reference, call=call: getattr(twin, call)(
                        x, reference
                    ),
                )


def _attention(ops: NativeOps) -> Iterator[Case]:
    twin = ReferenceOps()
    for sequences, rows, kv_len in (
        (1, 1, 256),
        (1, 1, 2048),
        (8, 1, 256),
        (32, 1, 256),
        (1, 256, 256),
        (1, 512, 512),
        (1, 512, 2048),
    ):
        row_bytes = KV_HEADS * HEAD_DIM * 2 * 2
        read = sequences * kv_len * row_bytes
        pools, step = _pools(sequences, rows, kv_len, max(1, min(30, WORKING_SET_BYTES // read)))
        q = torch.randn(sequences * rows, HEADS, HEAD_DIM)
        # Row i sees kv_len - rows + i + 1 keys; a product with K and one with V.
        seen = sequences * (rows * (kv_len - rows) + rows * (rows + 1) / 2)
        layers = cycle(pools)
        yield Case(
            "attention",
            f"{sequences} seq, {rows} rows, kv {kv_len}",
            moved=read + 2 * q.nbytes,
            ops=4 * seen * HEADS * HEAD_DIM,
            native=lambda q=q, layers=layers, step=step: ops.attention(q, next(layers), step, 0.1),
            twin=lambda q=q, pools=pools, step=step: twin.attention(q, pools[0], step, 0.1),
        )


def _pools(sequences: int, rows: int, kv_len: int, copies: int) -> tuple[list[KvLayer], Attend]:
    pages_each = -(-kv_len // PAGE_SIZE)
    table = torch.randperm(sequences * pages_each).int().view(sequences, pages_each)
    shape = (sequences * pages_each, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    pools = [
        KvLayer(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()) for _ in range(copies)
    ]
    place = torch.arange(kv_len - rows, kv_len)
    slots = table.long()[:, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    return pools, Attend(
        slots_T=slots.flatten().int(),
        positions_T=place.repeat(sequences).int(),
        page_table_NP=table,
        row_start_M=torch.arange(0, (sequences + 1) * rows, rows, dtype=torch.int32),
        kv_len_N=torch.full((sequences,), kv_len, dtype=torch.int32),
    )


def _pair(kernel: str, shape: str, moved: float, ops: Ops, call: Callable[[Ops], object]) -> Case:
    """A case that native and twin do with the same call."""
    twin = ReferenceOps()
    return Case(kernel, shape, moved, 0, lambda: call(ops), lambda: call(twin))


def _norm(ops: NativeOps) -> Iterator[Case]:
    weight = torch.ones(HIDDEN)
    for rows in (1, 32, 512):
        x, y = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        shape = f"{rows}x{HIDDEN}"
        yield _pair("norm", shape, 2 * x.nbytes, ops, lambda o, x=x: o.rms_norm(x, weight, 1e-5))
        yield _pair(
            "norm",
            f"{shape} with add",
            4 * x.nbytes,
            ops,
            lambda o, x=x, y=y: o.add_rms_norm(x, y, weight, 1e-5),
        )


def _rope(ops: NativeOps) -> Iterator[Case]:
    table = rope_table({"rope_theta": 1e5}, HEAD_DIM, 2048)
    for rows in (1, 32, 512):
        both = torch.randn(rows, HEADS + KV_HEADS, HEAD_DIM)
        positions = torch.arange(rows, dtype=torch.int32)
        yield _pair(
            "rope",
            f"{rows} rows, {HEADS} + {KV_HEADS} heads",
            2 * both.nbytes,
            ops,
            lambda o, both=both, positions=positions: o.rope(
                both[:, :HEADS], both[:, HEADS:], positions, table
            ),
        )


def _silu(ops: NativeOps) -> Iterator[Case]:
    for rows in (1, 32, 512):
        x = torch.randn(rows, 2 * FFN)
        yield _pair("silu", f"{rows}x{FFN}", 1.5 * x.nbytes, ops, lambda o, x=x: o.silu_mul(x))


def _embed(ops: NativeOps) -> Iterator[Case]:
    table = torch.randn(VOCAB, HIDDEN).bfloat16()
    packed = {id(ops): ops.pack(table)}
    for rows in (1, 32, 512):
        ids = torch.randint(0, VOCAB, (rows,))
        moved = rows * HIDDEN * 6
        yield _pair("embed", f"{rows} rows", moved, ops, lambda o, ids=ids: o.embed(table, ids))
        yield _pair(
            "embed",
            f"{rows} rows, packed",
            moved,
            ops,
            lambda o, ids=ids: o.embed(packed.get(id(o), table), ids),
        )


def _kv(ops: NativeOps) -> Iterator[Case]:
    shape = (4096, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    kv = KvLayer(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16())
    row_bytes = KV_HEADS * HEAD_DIM * 2 * 2
    for rows in (1, 32, 512):
        k, v = torch.randn(rows, KV_HEADS, HEAD_DIM), torch.randn(rows, KV_HEADS, HEAD_DIM)
        slots = torch.randperm(4096 * PAGE_SIZE)[:rows].int()
        others = torch.randperm(4096 * PAGE_SIZE)[:rows].int()
        yield _pair(
            "kv",
            f"append {rows}",
            3 * rows * row_bytes,  # float32 in, bfloat16 out
            ops,
            lambda o, k=k, v=v, slots=slots: o.kv_append(k, v, kv, slots),
        )
        yield _pair(
            "kv",
            f"gather {rows}",
            2 * rows * row_bytes,
            ops,
            lambda o, slots=slots: o.kv_gather(kv, slots),
        )
        yield _pair(
            "kv",
            f"move {rows}",
            2 * rows * row_bytes,
            ops,
            lambda o, slots=slots, others=others: o.kv_move(kv, slots, others),
        )


def _cp(ops: NativeOps) -> Iterator[Case]:
    for rows in (32, 512, 8192):
        x, lengths = torch.randn(rows, HIDDEN), (rows - rows // 3, rows // 3)
        for kind in get_args(CpKind):
            yield _pair(
                "cp",
                f"split {rows}, {kind}",
                x.nbytes,  # half of the rows, read and written
                ops,
                lambda o, x=x, kind=kind, lengths=lengths: o.cp_split(x, kind, 2, 0, lengths),
            )
            yield _pair(
                "cp",
                f"join {rows}, {kind}",
                2 * x.nbytes,
                ops,
                lambda o, x=x, kind=kind, lengths=lengths: o.cp_join(x, kind, 2, lengths),
            )


def _kv_copy(ops: NativeOps) -> Iterator[Case]:
    """From all heads in pages of 16 to pages of 64, and to a rank that has one of them."""
    tokens, row_bytes = 2048, HEAD_DIM * 2 * 2
    for name, heads_to, heads in (("all heads", KV_HEADS, KV_HEADS), ("one head", 1, 1)):
        pools = [
            KvLayer(*(torch.zeros(tokens // size, size, n, HEAD_DIM).bfloat16() for _ in "kv"))
            for size, n in ((PAGE_SIZE, KV_HEADS), (4 * PAGE_SIZE, heads_to))
        ]
        tables = [torch.randperm(pool.k_PSHD.shape[0]).int() for pool in pools]
        for end in (16, 2048):
            copy = KvCopy(tables[0], tables[1], end, heads=heads)
            yield _pair(
                "kv_copy",
                f"{end} tokens, {name}",
                2 * end * heads * row_bytes,
                ops,
                lambda o, pools=pools, copy=copy: o.kv_copy(pools[0], pools[1], copy),
            )


def _sample(ops: NativeOps) -> Iterator[Case]:
    settings = {
        "greedy": Sampling(temperature=0.0),
        "plain": Sampling(temperature=0.8, seed=1),
        "top_k top_p min_p": Sampling(temperature=0.8, seed=1, top_k=50, top_p=0.9, min_p=0.05),
    }
    native, twin = NativeSampler(ops.team), open_sampler("reference")
    for rows in (1, 32):
        logits = torch.randn(rows, VOCAB) * 3
        for name, sampling in settings.items():
            drawn = [SampleRow(History(sampling, [1, 2, 3], 3), 3) for _ in range(rows)]

            def draw(
                sampler: Sampler, x: Tensor = logits, drawn: list[SampleRow] = drawn
            ) -> object:
                return sampler.sample(x, drawn)

            yield Case(
                "sample",
                f"{rows} rows, {name}",
                logits.nbytes,
                0,
                lambda draw=draw: draw(native),
                lambda draw=draw: draw(twin),
            )


KERNELS: dict[str, Callable[[NativeOps], Iterator[Case]]] = {
    "linear": _linear,
    "linear_parts": _linear_parts,
    "attention": _attention,
    "norm": _norm,
    "rope": _rope,
    "silu": _silu,
    "embed": _embed,
    "kv": _kv,
    "kv_copy": _kv_copy,
    "cp": _cp,
    "sample": _sample,
}
