"""KV from one paged layout to another: every byte asked for written once, no other touched."""

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import KvCopy, KvLayer
from aserve.tensor.reference import ReferenceOps

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.int8}
TWIN = ReferenceOps()


def numbered(shape: tuple[int, ...], dtype: torch.dtype, first: int) -> Tensor:
    """Bit patterns that tell places apart, whatever numbers they are."""
    count = torch.Size(shape).numel()
    return torch.arange(first, first + count).to(BITS[dtype]).view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    return x.view(BITS[x.dtype])


def clone(kv: KvLayer) -> KvLayer:
    return KvLayer(kv.k_PSHD.clone(), kv.v_PSHD.clone())


def random_copy(draw: random.Random) -> tuple[tuple[int, ...], tuple[int, ...], KvCopy]:
    """Shapes of two pools and a copy that fits them."""
    dim, heads = draw.choice((1, 8, 20, 64)), draw.randint(1, 3)
    more = draw.choice(((0, 0), (0, 0), (2, 0), (0, 1), (1, 2)))
    sizes = [draw.choice((1, 3, 16, 24, 64)) for _ in range(2)]
    end = draw.choice((0, 1, draw.randint(1, 40), draw.randint(1, 150)))
    pages = [-(-end // size) for size in sizes]
    totals = [n + draw.randint(1, 4) for n in pages]
    tables = [
        torch.tensor(draw.sample(range(total), n), dtype=torch.int32)
        for total, n in zip(totals, pages, strict=True)
    ]
    copy = KvCopy(
        pages_from=tables[0],
        pages_to=tables[1],
        end=end,
        begin=draw.choice((0, draw.randint(0, end))),
        head_from=draw.randint(0, more[0]),
        head_to=draw.randint(0, more[1]),
        heads=heads,
    )
    return (
        (totals[0], sizes[0], heads + more[0], dim),
        (totals[1], sizes[1], heads + more[1], dim),
        copy,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_is_written_once_and_no_other_is_touched(
    ops: NativeOps, dtype: torch.dtype
) -> None:
    draw = random.Random(0)
    for _ in range(40):
        shape_from, shape_to, copy = random_copy(draw)
        source = KvLayer(numbered(shape_from, dtype, 7), numbered(shape_from, dtype, 11))
        before = KvLayer(numbered(shape_to, dtype, 13), numbered(shape_to, dtype, 17))
        native, expected = clone(before), clone(before)
        kept = clone(source)
        ops.kv_copy(source, native, copy)
        TWIN.kv_copy(source, expected, copy)
        for got, want in ((native, expected), (source, kept)):
            assert torch.equal(bits(got.k_PSHD), bits(want.k_PSHD))
            assert torch.equal(bits(got.v_PSHD), bits(want.v_PSHD))
        # One at a time, token by token and head by head: what the twin itself must be.
        size_from, size_to = shape_from[1], shape_to[1]
        for at in range(copy.begin, copy.end):
            page_from = int(copy.pages_from[at // size_from])
            page_to = int(copy.pages_to[at // size_to])
            for head in range(copy.heads or 0):
                before.k_PSHD[page_to, at % size_to, copy.head_to + head] = source.k_PSHD[
                    page_from, at % size_from, copy.head_from + head
                ]
        assert torch.equal(bits(native.k_PSHD), bits(before.k_PSHD))


@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_for_all_parts_fill_a_sequence(ops: NativeOps, dtype: torch.dtype) -> None:
    # From two ranks of three heads to three ranks of two, in chunks, as a transfer would go.
    n, dim = 75, 16
    whole = numbered((n, 6, dim), dtype, 5)
    sources = [KvLayer(*(torch.zeros(5, 16, 3, dim, dtype=dtype) for _ in "kv")) for _ in range(2)]
    pages_from = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32)
    for rank, source in enumerate(sources):
        part = torch.zeros(80, 3, dim, dtype=dtype)
        part[:n] = whole[:, rank * 3 : rank * 3 + 3]
        source.k_PSHD[pages_from.long()] = part.view(5, 16, 3, dim)
    pages_to = torch.tensor([7, 2, 9, 4], dtype=torch.int32)
    for rank in range(3):
        pool = KvLayer(*(torch.zeros(10, 24, 2, dim, dtype=dtype) for _ in "kv"))
        for head in (rank * 2, rank * 2 + 1):
            copy = KvCopy(
                pages_from, pages_to, 0, head_from=head % 3, head_to=head - rank * 2, heads=1
            )
            for begin, end in ((0, 32), (32, 48), (48, n)):
                now = dataclasses.replace(copy, begin=begin, end=end)
                ops.kv_copy(sources[head // 3], pool, now)
        filled = pool.k_PSHD[pages_to.long()].reshape(96, 2, dim)
        assert torch.equal(bits(filled[:n]), bits(whole[:, rank * 2 : rank * 2 + 2].contiguous()))
        assert filled[n:].eq(0).all()


def test_misfits_are_refused(ops: NativeOps) -> None:
    source = KvLayer(torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8))
    to = KvLayer(torch.zeros(6, 8, 3, 8), torch.zeros(6, 8, 3, 8))
    good = KvCopy(
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([5, 0, 1, 2], dtype=torch.int32),
        end=32,
    )
    ops.kv_copy(source, to, good)

    def refused(match: str, destination: KvLayer = to, **changes: object) -> None:
        with pytest.raises(ValueError, match=match):
            ops.kv_copy(source, destination, dataclasses.replace(good, **changes))

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    refused("outside the source's pages", end=33, pages_to=ints(0, 1, 2, 3, 4))
    refused("outside the destination's pages", pages_to=ints(0, 1, 2))
    refused("source page 4 is outside", pages_from=ints(0, 4))
    refused("destination page -1 is outside", pages_to=ints(0, 1, 2, -1))
    refused("occurs twice", pages_to=ints(0, 1, 2, 0))
    refused("no range", begin=33)
    refused("no range", begin=-1)
    refused("outside the source", heads=3)
    refused("outside the source", heads=0)
    refused("outside the source", head_from=-1)
    refused("outside the destination", head_to=2)
    refused("outside the destination", head_to=2**62)
    refused("int32", pages_from=torch.tensor([0, 3]))
    refused("cannot be copied", KvLayer(to.k_PSHD.bfloat16(), to.v_PSHD.bfloat16()))
    refused("head_dim", KvLayer(to.k_PSHD[..., :4].clone(), to.v_PSHD[..., :4].clone()))
    refused("source and destination", source, pages_to=ints(1, 3))
    ops.kv_copy(source, source, dataclasses.replace(good, pages_to=ints(1, 2)))
