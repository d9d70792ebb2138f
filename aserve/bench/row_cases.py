"""The operations on rows and pages: norms, rope, activation, embedding, KV, context parallelism,
sampling."""

from collections.abc import Callable, Iterator
from typing import get_args

import torch
from torch import Tensor

from aserve.bench import case
from aserve.bench.case import FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, PAGE_SIZE, Case, pair
from aserve.core.message import Sampling
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import CpKind, KvCopy, KvLayer
from aserve.tensor.rope import rope_table
from aserve.tensor.sampler import History, NativeSampler, Sampler, SampleRow, open_sampler


def _norm(ops: NativeOps) -> Iterator[Case]:
    weight = torch.ones(HIDDEN)
    for rows in (1, 32, 512):
        x, y = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
        shape = f"{rows}x{HIDDEN}"
        yield pair("norm", shape, 2 * x.nbytes, ops, lambda o, x=x: o.rms_norm(x, weight, 1e-5))
        yield pair(
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
        yield pair(
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
        yield pair("silu", f"{rows}x{FFN}", 1.5 * x.nbytes, ops, lambda o, x=x: o.silu_mul(x))


def _embed(ops: NativeOps) -> Iterator[Case]:
    table = torch.randn(case.VOCAB, HIDDEN).bfloat16()
    packed = {id(ops): ops.pack(table)}
    for rows in (1, 32, 512):
        ids = torch.randint(0, case.VOCAB, (rows,))
        moved = rows * HIDDEN * 6
        yield pair("embed", f"{rows} rows", moved, ops, lambda o, ids=ids: o.embed(table, ids))
        yield pair(
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
        yield pair(
            "kv",
            f"append {rows}",
            3 * rows * row_bytes,  # float32 in, bfloat16 out
            ops,
            lambda o, k=k, v=v, slots=slots: o.kv_append(k, v, kv, slots),
        )
        yield pair(
            "kv",
            f"gather {rows}",
            2 * rows * row_bytes,
            ops,
            lambda o, slots=slots: o.kv_gather(kv, slots),
        )
        yield pair(
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
            yield pair(
                "cp",
                f"split {rows}, {kind}",
                x.nbytes,  # half of the rows, read and written
                ops,
                lambda o, x=x, kind=kind, lengths=lengths: o.cp_split(x, kind, 2, 0, lengths),
            )
            yield pair(
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
            yield pair(
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
        logits = torch.randn(rows, case.VOCAB) * 3
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
    "norm": _norm,
    "rope": _rope,
    "silu": _silu,
    "embed": _embed,
    "kv": _kv,
    "kv_copy": _kv_copy,
    "cp": _cp,
    "sample": _sample,
}
