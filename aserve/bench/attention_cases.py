"""Paged attention: decode at several lengths, chains and trees of drafts being verified, chunks of
prompts; over KV in bfloat16 and in int8."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.bench import case
from aserve.bench.case import HEAD_DIM, HEADS, KV_HEADS, PAGE_SIZE, Case
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import SCALE_BYTES, Attend, KvLayer, paths_of, tree_of
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


def tree_step(shape: Rows, parents: Sequence[int]) -> Attend:
    """As `step_of`, the new rows of each sequence being a tree."""
    assert len(parents) == shape.rows, (parents, shape)
    rows, step = shape.rows, step_of(shape)
    depths = [0] * rows
    for row, parent in enumerate(parents):
        depths[row] = 0 if parent < 0 else depths[parent] + 1
    positions = shape.kv_len - rows + torch.tensor(depths, dtype=torch.int32)
    tree = tree_of(paths_of(parents) * shape.sequences)
    return dataclasses.replace(step, positions_T=positions.repeat(shape.sequences), tree=tree)


def pools_for(shape: Rows, count: int, dtype: torch.dtype = torch.bfloat16) -> list[KvLayer]:
    pages = shape.sequences * -(-shape.kv_len // PAGE_SIZE)
    size = (pages, PAGE_SIZE, KV_HEADS, HEAD_DIM)

    def pool() -> Tensor:
        if dtype != torch.int8:
            return torch.randn(size).to(dtype)
        values = torch.randint(-127, 128, size, dtype=torch.int8)
        scales = torch.full((*size[:3], 1), 0.02).view(torch.int8)
        return torch.cat([values, scales], dim=3)

    return [KvLayer(pool(), pool()) for _ in range(count)]


def kv_bytes(shape: Rows, dtype: torch.dtype = torch.bfloat16) -> int:
    head = HEAD_DIM + SCALE_BYTES if dtype == torch.int8 else HEAD_DIM * dtype.itemsize
    return shape.sequences * shape.kv_len * KV_HEADS * head * 2


def seen_keys(shape: Rows) -> float:
    """Over all rows: row i sees kv_len - rows + i + 1 of them."""
    rows = shape.rows
    return shape.sequences * (rows * (shape.kv_len - rows) + rows * (rows + 1) / 2)


def attention(ops: NativeOps, shapes: Sequence[Rows] = SHAPES) -> Iterator[Case]:
    for shape in shapes:
        yield _case(ops, shape, step_of(shape), f"{shape.rows} rows")
    for shape in (Rows(32, 1, 256), Rows(1, 1, 2048)):
        yield _case(ops, shape, step_of(shape), f"{shape.rows} rows", torch.int8)
    for rows in (8, 32):
        shape = Rows(1, rows, 256)
        step = tree_step(shape, [(row - 1) // 2 for row in range(rows)])
        yield _case(ops, shape, step, f"tree of {rows}")


def _case(
    ops: NativeOps, shape: Rows, step: Attend, what: str, dtype: torch.dtype = torch.bfloat16
) -> Case:
    """Of a tree the floor is that of as many rows in a chain: a few keys too many."""
    twin, read = ReferenceOps(), kv_bytes(shape, dtype)
    copies = case.copies(read)
    pools = pools_for(shape, copies, dtype)
    q, layers = torch.randn(shape.sequences * shape.rows, HEADS, HEAD_DIM), cycle(pools)
    kind = ", int8" if dtype == torch.int8 else ""
    return Case(
        "attention",
        f"{shape.sequences} seq, {what}, kv {shape.kv_len}{kind}",
        moved=read + 2 * q.nbytes,
        ops=4 * seen_keys(shape) * HEADS * HEAD_DIM,  # a product with K and one with V
        native=lambda: ops.attention(q, next(layers), step, 0.1),
        twin=lambda: twin.attention(q, pools[0], step, 0.1),
        span=copies * read,
    )
