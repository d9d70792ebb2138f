"""The conformance suite of layer planes: cases that every transport must pass, for every rank.

A case is a layout and what each of its ranks does; a transport is a function that runs a case and
answers with what each rank raised. All a rank checks it computes from seeds: nothing is exchanged.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import GROUPS, Grid
from aserve.planes.layer import LayerEnd
from aserve.tensor.collective import sum_blocks
from aserve.testing.disagreement import Case, disagreements, refused

# Opens the case's planes, runs `case.body(plane, grid)` on every rank at once, closes the planes
# when all have ended, and answers with each rank's exception, or text of one, or None.
RunCase = Callable[[Case], Mapping[int, object]]


def check_collective(run: RunCase, names: Iterable[str] | None = None) -> None:
    """Run cases (all by default) over a transport; raises AssertionError naming case and ranks."""
    for name in CASES if names is None else names:
        outcomes = run(CASES[name])
        assert len(outcomes) == Grid(CASES[name].layout).world, f"{name}: a rank did not answer"
        wrong = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}
        for outcome in wrong.values():
            if isinstance(outcome, BaseException):
                raise AssertionError(f"{name}: {wrong}") from outcome
        assert not wrong, f"{name}: {wrong}"


def drawn(shape: Sequence[int], dtype: torch.dtype, *words: object) -> Tensor:
    """The same numbers on every rank for the same words, over the range of sums that round."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(words).encode()))
    values = torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * 100
    return values.to(dtype)


def same_bits(got: Tensor, expected: Tensor) -> None:
    assert got.dtype is expected.dtype, (got.dtype, expected.dtype)
    assert got.shape == expected.shape, (got.shape, expected.shape)
    assert got.is_contiguous()
    if not torch.equal(got, expected):
        raise AssertionError(f"{got} is not {expected}")


class Group:
    """One rank's view of a group for a check: every call checked, inputs and results spoilt."""

    def __init__(self, plane: LayerEnd, grid: Grid, name: str) -> None:
        self.end = plane.group(name)
        self.members = grid.group(name, plane.rank)
        self.name = name
        self.rank = plane.rank
        assert (self.end.rank, self.end.size) == (self.members.index(plane.rank), self.size)

    @property
    def size(self) -> int:
        return len(self.members)

    def all_reduce(self, shape: Sequence[int], dtype: torch.dtype, *words: object) -> None:
        parts = [drawn(shape, dtype, member, *words) for member in self.members]
        given = parts[self.end.rank].clone()
        got = self.end.all_reduce(given)
        self._spoil(given, got, sum_blocks(torch.cat(parts)))

    def reduce_scatter(
        self, n_blocks: int, counts: Sequence[int], width: int, dtype: torch.dtype, *words: object
    ) -> None:
        shape = (n_blocks, sum(counts), width)
        parts = [drawn(shape, dtype, member, *words) for member in self.members]
        given = parts[self.end.rank].clone()
        got = self.end.reduce_scatter(given, counts)
        self._spoil(given, got, sum_blocks(torch.cat(parts)).split(list(counts))[self.end.rank])

    def all_gather(
        self, counts: Sequence[int], row: Sequence[int], dtype: torch.dtype, *words: object
    ) -> None:
        given = [
            drawn((count, *row), dtype, member, *words)
            for member, count in zip(self.members, counts, strict=True)
        ]
        x = given[self.end.rank].clone()
        self._spoil(x, self.end.all_gather(x, counts), torch.cat(given))

    def all_to_all(
        self, counts: Sequence[Sequence[int]], width: int, dtype: torch.dtype, *words: object
    ) -> None:
        """`counts[i][j]` rows go from place i to place j."""
        place = self.end.rank
        given = [
            drawn((sum(counts[i]), width), dtype, member, *words)
            for i, member in enumerate(self.members)
        ]
        pieces = [x.split(list(counts[i]))[place] for i, x in enumerate(given)]
        x = given[place].clone()
        got = self.end.all_to_all(x, counts[place], [sent[place] for sent in counts])
        self._spoil(x, got, torch.cat(pieces))

    def _spoil(self, given: Tensor, got: Tensor, expected: Tensor) -> None:
        """Whoever still reads what this rank gave, or shares what it got, will read this."""
        if self.size == 1:
            same_bits(got, expected)
            return
        given.fill_(77)
        same_bits(got, expected)
        got.fill_(78)


def every_op(group: Group, step: int) -> None:
    """One call of each kind with ragged rows, an empty rank among them."""
    n = group.size
    counts = [(2 * place + step) % 3 for place in range(n)]
    exchanged = [[(i + 2 * j + step) % 3 for j in range(n)] for i in range(n)]
    for dtype in (torch.float32, torch.float64):
        group.all_reduce((2, 3, 5), dtype, step)
        group.reduce_scatter(1, counts, 5, dtype, step)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        group.all_gather(counts, (5,), dtype, step)
        group.all_to_all(exchanged, 5, dtype, step)


def _all_groups(plane: LayerEnd, grid: Grid) -> None:
    for step in range(3):
        plane.start(step)
        for name in GROUPS:
            every_op(Group(plane, grid, name), step)


def _no_rows(plane: LayerEnd, grid: Grid) -> None:
    tp = Group(plane, grid, "tp")
    none = [0] * tp.size
    plane.start(0)
    tp.all_reduce((1, 0, 4), torch.float32)
    tp.all_gather(none, (4,), torch.bfloat16)
    tp.reduce_scatter(2, none, 4, torch.float64)
    tp.all_to_all([none] * tp.size, 4, torch.float32)
    one = [0] * (tp.size - 1) + [1]
    tp.all_gather(one, (4,), torch.float32, "one")
    tp.reduce_scatter(1, one, 4, torch.float32, "one")
    tp.all_to_all([one] * tp.size, 4, torch.int64, "one")
    tp.all_to_all([none] * (tp.size - 1) + [[3] * tp.size], 4, torch.int64, "from one")


def _blocks(plane: LayerEnd, grid: Grid) -> None:
    tp = Group(plane, grid, "tp")
    plane.start(0)
    for n_blocks in (1, 2, 3, 8):
        for dtype in (torch.float32, torch.float64):
            tp.all_reduce((n_blocks, 7, 9), dtype, n_blocks)
            tp.all_reduce((n_blocks,), dtype, n_blocks)
            tp.reduce_scatter(n_blocks, [3, 0, 5, 1][: tp.size], 9, dtype, n_blocks)


def _order(plane: LayerEnd, grid: Grid) -> None:
    """Sums whose rounding tells their order: left to right, whatever rank comes first."""
    tp = plane.group("tp")
    plane.start(0)
    values = [1e8, 1.0, -1e8, 1.0, 3.0, -1.0, 1e-8, 2.0][: 2 * tp.size]
    mine = torch.tensor(values[2 * tp.rank : 2 * tp.rank + 2]).view(2, 1)
    same_bits(tp.all_reduce(mine), sum_blocks(torch.tensor(values).view(-1, 1)))
    zeros = torch.full((2, 3), -0.0)
    assert bool(torch.signbit(tp.all_reduce(zeros)).all()), "a sum starts from its first block"


def _large(plane: LayerEnd, grid: Grid) -> None:
    """Larger than what a transport can hand over at once, not in whole multiples of it."""
    tp = Group(plane, grid, "tp")
    n = tp.size
    plane.start(0)
    tp.all_reduce((2, 333_337), torch.float32)
    tp.all_gather([250_001, 3, 90_000, 0][:n], (2,), torch.float64)
    tp.reduce_scatter(2, [111_113, 0, 7, 100_003][:n], 3, torch.float32)
    tp.all_to_all([[40_009 * ((i + j) % 3) for j in range(n)] for i in range(n)], 5, torch.float32)
    tp.all_reduce((1, 3), torch.float32, "and a small one after it")


def _many(plane: LayerEnd, grid: Grid) -> None:
    tp, rows = Group(plane, grid, "tp"), Group(plane, grid, "rows")
    for step in range(5):
        plane.start(step)
        for number in range(16):
            tp.all_reduce((1, 4, 16), torch.float32, step, number)
            rows.all_gather([number % 4] * rows.size, (16,), torch.float32, step, number)


def _repeatable(plane: LayerEnd, grid: Grid) -> None:
    tp = plane.group("tp")
    plane.start(0)
    x = drawn((3, 5, 64), torch.float32, plane.rank)
    first = tp.all_reduce(x)
    for _ in range(20):
        same_bits(tp.all_reduce(x), first)
    counts = [5, *[0] * (tp.size - 1)]
    assert torch.equal(tp.reduce_scatter(x, counts), first[: counts[tp.rank]])


def _last_call(plane: LayerEnd, grid: Grid) -> None:
    assert plane.last_call == f"rank {plane.rank} has made no call"
    plane.start(7)
    tp = plane.group("tp")
    tp.all_reduce(torch.zeros(1, 4))
    tp.all_gather(torch.zeros(1, 4), [1] * tp.size)
    said = f"rank {plane.rank} all_gather#1 of step 7 over tp float32 [1, 4] counts"
    assert plane.last_call.startswith(said), plane.last_call
    assert plane.last_call.endswith("(returned)"), plane.last_call


def _wrong_alone(plane: LayerEnd, grid: Grid) -> None:
    """What one rank can see to be wrong is a ValueError before anybody is met."""
    tp = plane.group("tp")
    plane.start(0)
    x = torch.zeros(2, 4)
    wrong: list[Callable[[], object]] = [
        lambda: tp.all_gather(x, [2]),
        lambda: tp.all_gather(x, [1] * tp.size),
        lambda: tp.reduce_scatter(x, [1] * tp.size),
        lambda: tp.all_reduce(x.bfloat16()),
        lambda: tp.all_reduce(x[:0]),
        lambda: tp.all_to_all(x, [2] * tp.size, [2] * tp.size),
        lambda: tp.all_gather(x.to(torch.complex64), [2] * tp.size),
    ]
    for call in wrong:
        refused(ValueError, call, ".")
    same_bits(tp.all_reduce(torch.ones(1, 2)), torch.full((2,), float(tp.size)))


def _cases() -> dict[str, Case]:
    found = [Case(f"every op over {n} ranks", Layout(tp=n), _all_groups) for n in range(1, 5)]
    found += [
        Case("groups of attention DP", Layout(tp=4, dp=2, ep=2), _all_groups),
        Case("groups of context and experts", Layout(tp=4, cp=2, moe_dp=2, ep=2), _all_groups),
        Case("groups on every axis", Layout(tp=8, dp=2, cp=2, moe_dp=2, ep=2), _all_groups),
        Case("two stages", Layout(pp=2, tp=2, dp=2), _all_groups),
        Case("no rows", Layout(tp=3), _no_rows),
        Case("blocks", Layout(tp=4), _blocks),
        Case("order of sums", Layout(tp=4), _order),
        Case("large tensors", Layout(tp=3), _large),
        Case("many calls", Layout(tp=4, dp=2), _many),
        Case("repeatable", Layout(tp=3), _repeatable),
        Case("last call", Layout(tp=2), _last_call),
        Case("wrong alone", Layout(tp=2), _wrong_alone),
        *disagreements(),
    ]
    return {case.name: case for case in found}


CASES = _cases()
