"""Paged attention: decode at several lengths, drafts being verified, chunks of prompts."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch

from aserve.bench import case
from aserve.bench.case import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Case
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.reference import ReferenceOps


class Rows(NamedTuple):
    """`sequences` of `kv_len` tokens each, the last `rows` of them new in this step."""

    sequences: int
    rows: int
    kv_len: int


SHAPES = (
    *(Rows(1, 1, kv_len) for kv_len in (256, 2048, 8192)),
    *(Rows(n, 1, 256) for n in (8, 32)),
    *(Rows(1, rows, 256) for rows in (4, 8)),
    *(Rows(1, 512, kv_len) for kv_len in (512, 2048)),
)


def step_of(shape: Rows) -> Attend:
    """Pages in random order."""
    pages_each = -(-shape.kv_len // PAGE_SIZE)
    table = torch.randperm(shape.sequences * pages_each).int().view(shape.sequences, pages_each)
    place = torch.arange(shape.kv_len - shape.rows, shape.kv_len)
    slots = table.long()[:, place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    ends = (shape.sequences + 1) * shape.rows
    return Attend(
        slots_T=slots.flatten().int(),
        positions_T=place.repeat(shape.sequences).int(),
        page_table_NP=table,
        row_start_M=torch.arange(0, ends, shape.rows, dtype=torch.int32),
        kv_len_N=torch.full((shape.sequences,), shape.kv_len, dtype=torch.int32),
    )


def pools_for(shape: Rows, count: int) -> list[KvLayer]:
    pages = shape.sequences * -(-shape.kv_len // PAGE_SIZE)
    size = (pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    return [KvLayer(*(torch.randn(size).bfloat16() for _ in "kv")) for _ in range(count)]


def kv_bytes(shape: Rows) -> int:
    return shape.sequences * shape.kv_len * KV_HEADS * HEAD_DIM * 2 * 2


def seen_keys(shape: Rows) -> float:
    """Over all rows: row i sees kv_len - rows + i + 1 of them."""
    rows = shape.rows
    return shape.sequences * (rows * (shape.kv_len - rows) + rows * (rows + 1) / 2)


def attention(ops: NativeOps, shapes: Sequence[Rows] = SHAPES) -> Iterator[Case]:
    twin = ReferenceOps()
    for shape in shapes:
        read = kv_bytes(shape)
        copies = case.copies(read)
        pools, step = pools_for(shape, copies), step_of(shape)
        q = torch.randn(shape.sequences * shape.rows, HEADS, HEAD_DIM)
        layers = cycle(pools)
        yield Case(
            "attention",
            f"{shape.sequences} seq, {shape.rows} rows, kv {shape.kv_len}",
            moved=read + 2 * q.nbytes,
            ops=4 * seen_keys(shape) * HEADS * HEAD_DIM,  # a product with K and one with V
            native=lambda q=q, layers=layers, step=step: ops.attention(q, next(layers), step, 0.1),
            twin=lambda q=q, pools=pools, step=step: twin.attention(q, pools[0], step, 0.1),
            span=copies * read,
        )
