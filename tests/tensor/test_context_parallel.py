"""Rows of a group over context-parallel ranks: each in one place, in order, and back again."""

from collections.abc import Sequence
from typing import get_args

import pytest
import torch

from aserve.tensor.native import NativeOps
from aserve.tensor.ops import CpKind, Ops
from aserve.tensor.reference import ReferenceOps

KINDS = get_args(CpKind)
TWIN = ReferenceOps()
GROUPS = ((), (0,), (1,), (7,), (16,), (5, 0, 1, 30), (0, 0, 3), (2, 2, 2, 2, 2), (640, 1, 77))


def first_principles(kind: str, cp: int, lengths: Sequence[int]) -> list[list[int]]:
    """Rows of each rank, dealt out one at a time."""
    rows: list[list[int]] = [[] for _ in range(cp)]
    start = 0
    for length in lengths:
        if kind == "interleave":
            for row in range(start, start + length):
                rows[row % cp].append(row)
        else:
            row = start
            for block in range(2 * cp):
                size = length // (2 * cp) + (block < length % (2 * cp))
                rows[min(block, 2 * cp - 1 - block)] += range(row, row + size)
                row += size
            assert row == start + length
        start += length
    return rows


@pytest.fixture(params=["native", "reference"])
def either(request: pytest.FixtureRequest, ops: NativeOps) -> Ops:
    return ops if request.param == "native" else TWIN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [1, 2, 3, 8])
def test_every_row_has_one_rank_and_ranks_keep_the_order(
    either: Ops, cp: int, kind: CpKind
) -> None:
    for lengths in GROUPS:
        expected = first_principles(kind, cp, lengths)
        counts = either.cp_counts(kind, cp, lengths)
        assert counts.dtype == torch.int32
        assert counts.shape == (cp, len(lengths))
        assert counts.sum(0).tolist() == list(lengths)
        for rank in range(cp):
            rows = either.cp_index(kind, cp, rank, lengths)
            assert rows.dtype == torch.int32
            assert rows.tolist() == expected[rank] == sorted(expected[rank])
            ends = torch.tensor(lengths).cumsum(0)
            owner = torch.searchsorted(ends, rows.long(), right=True)
            assert counts[rank].tolist() == owner.bincount(minlength=len(lengths)).tolist()


def test_zigzag_ranks_see_about_as_many_keys(ops: NativeOps) -> None:
    seen = [int((ops.cp_index("zigzag", 4, rank, [4096]) + 1).sum()) for rank in range(4)]
    assert max(seen) - min(seen) < 0.001 * min(seen)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("inner", [(), (3,), (2, 129)])
def test_split_takes_the_indexed_rows_and_join_undoes_it(
    ops: NativeOps, inner: tuple[int, ...], dtype: torch.dtype, kind: CpKind
) -> None:
    torch.manual_seed(0)
    for lengths in GROUPS:
        x = torch.randint(0, 200, (sum(lengths), *inner)).to(dtype)
        for cp in (1, 2, 5):
            parts = [ops.cp_split(x, kind, cp, rank, lengths) for rank in range(cp)]
            for rank, part in enumerate(parts):
                assert torch.equal(part, x[ops.cp_index(kind, cp, rank, lengths).long()])
                assert torch.equal(part, TWIN.cp_split(x, kind, cp, rank, lengths))
            gathered = torch.cat(parts)
            assert torch.equal(ops.cp_join(gathered, kind, cp, lengths), x)
            assert torch.equal(TWIN.cp_join(gathered, kind, cp, lengths), x)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_part_of_wider_rows(ops: NativeOps, kind: CpKind) -> None:
    wide = torch.randn(40, 6, 8)
    x = wide[:, 2:4]
    assert torch.equal(
        ops.cp_split(x, kind, 3, 1, (11, 29)), ops.cp_split(x.clone(), kind, 3, 1, (11, 29))
    )
    assert torch.equal(ops.cp_join(x, kind, 3, (11, 29)), TWIN.cp_join(x, kind, 3, (11, 29)))


def test_empty_rows_are_rows(ops: NativeOps) -> None:
    assert ops.cp_split(torch.empty(9, 0), "zigzag", 2, 0, (9,)).shape == (5, 0)
    assert ops.cp_join(torch.empty(9, 0), "interleave", 2, (9,)).shape == (9, 0)


def test_misfits_are_refused(either: Ops) -> None:
    x = torch.randn(6, 4)
    refusals = {
        "'diagonal'": lambda: either.cp_index("diagonal", 2, 0, [6]),  # type: ignore[arg-type]
        r"outside \[0, cp": lambda: either.cp_index("zigzag", 2, 2, [6]),
        "rank is": lambda: either.cp_split(x, "zigzag", 2, -1, [6]),
        "negative": lambda: either.cp_counts("interleave", 2, [6, -1]),
        "rows": lambda: either.cp_split(x, "zigzag", 2, 0, [7]),
        "does not have|x has 6": lambda: either.cp_join(x, "interleave", 2, [3, 2]),
        "cp is 0": lambda: either.cp_counts("zigzag", 0, [6]),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_native_rows_must_be_contiguous(ops: NativeOps) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        ops.cp_split(torch.randn(4, 6).T, "zigzag", 2, 0, [6])
    with pytest.raises(ValueError, match="int32 can count"):
        ops.cp_index("interleave", 2, 0, [2**31 - 1, 1])
