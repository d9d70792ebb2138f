"""Cases of the layer planes' conformance suite in which ranks do not meet, and must hear why."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout
from aserve.planes.layer import LayerEnd

E = TypeVar("E", bound=Exception)

LIMIT_S = 20.0  # of cases in which every rank comes: only a broken transport gets near it
SHORT_S = 0.5  # of cases in which one stays away


class Case(NamedTuple):
    """A layout, what each of its ranks does, and how long one may wait for another."""

    name: str
    layout: Layout
    body: Callable[[LayerEnd, Grid], None]
    limit_s: float = LIMIT_S


ONES = torch.ones(2, 4)
# What rank 1 does while the others do the first.
DIFFERENT: dict[str, tuple[Callable[[LayerEnd], object], Callable[[LayerEnd], object]]] = {
    "op": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("tp").all_gather(ONES, [2] * plane.group("tp").size),
    ),
    "shape": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("tp").all_reduce(torch.ones(2, 5)),
    ),
    "dimensions": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("tp").all_reduce(ONES.view(2, 2, 2)),
    ),
    "blocks": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("tp").all_reduce(ONES[:1]),
    ),
    "dtype": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("tp").all_reduce(torch.ones(2, 2, dtype=torch.float64)),
    ),
    "counts": (
        lambda plane: plane.group("tp").all_gather(ONES, [2] * plane.group("tp").size),
        lambda plane: plane.group("tp").all_gather(
            ONES, [2 + (place != 1) for place in range(plane.group("tp").size)]
        ),
    ),
    "scattered counts": (
        lambda plane: plane.group("tp").reduce_scatter(torch.ones(1, 2, 4), [1, 1]),
        lambda plane: plane.group("tp").reduce_scatter(torch.ones(1, 2, 4), [0, 2]),
    ),
    "exchanged counts": (
        lambda plane: plane.group("tp").all_to_all(ONES, [1, 1], [1, 1]),
        lambda plane: plane.group("tp").all_to_all(ONES[:1], [0, 1], [1, 1]),
    ),
    "step": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: (plane.start(4), plane.group("tp").all_reduce(ONES)),
    ),
    "number": (
        lambda plane: (plane.start(4), plane.group("tp").all_reduce(ONES)),
        lambda plane: plane.group("tp").all_reduce(ONES),
    ),
    "name of the group": (
        lambda plane: plane.group("tp").all_reduce(ONES),
        lambda plane: plane.group("attn_tp").all_reduce(ONES),
    ),
}


def refused(kind: type[E], call: Callable[[], object], says: str = "") -> E:
    """The error of this very kind that a call must raise, with a text that holds `says`."""
    raised: E | None = None
    try:
        call()
    except kind as error:
        raised = error
    assert raised is not None, f"{kind.__name__} was not raised"
    assert type(raised) is kind, repr(raised)
    assert re.search(says, str(raised)), f"{raised} does not say {says}"
    return raised


def broken(plane: LayerEnd, error: PlaneError) -> None:
    """Every later use says the same as the first."""
    for use in (
        lambda: plane.group("tp").all_reduce(ONES),
        lambda: plane.group("tp").all_gather(ONES, [2] * plane.group("tp").size),
        lambda: plane.start(9),
    ):
        assert str(refused(type(error), use)) == str(error)


def _mismatch(what: str, plane: LayerEnd, grid: Grid) -> None:
    plane.start(3)
    plane.group("tp").all_reduce(ONES)
    call = DIFFERENT[what][plane.rank == 1]
    error = refused(PlaneMismatch, lambda: call(plane))
    assert len(error.calls) == 2, error.calls
    assert any(text.startswith("rank 1 ") for text in error.calls), error.calls
    assert any(not text.startswith("rank 1 ") for text in error.calls), error.calls
    assert all(" of step " in text and " over " in text for text in error.calls), error.calls
    broken(plane, error)


def _crossed(plane: LayerEnd, grid: Grid) -> None:
    """Ranks that wait for each other in different groups never meet."""
    plane.start(0)
    plane.group("tp").all_reduce(ONES)
    group = plane.group("rows" if plane.rank in (0, 1) else "tp")
    refused(
        PlaneMismatch,
        lambda: group.all_gather(ONES, [2] * group.size),
        r"over (tp|rows).* but .*over (tp|rows)",
    )


def _absent(absent: Sequence[int], plane: LayerEnd, grid: Grid) -> None:
    plane.start(5)
    plane.group("tp").all_reduce(torch.ones(1, 4))
    if plane.rank in absent:
        return
    tp = plane.group("tp")
    error = refused(PlaneTimeout, lambda: tp.all_gather(ONES, [2] * tp.size))
    assert error.missing == tuple(absent), error
    for rank in absent:
        assert f"rank {rank} all_reduce#0 of step 5 over tp float32 [1, 4]" in str(error), error
    assert "all_gather#1 of step 5" in str(error), error
    broken(plane, error)


def _aborted(plane: LayerEnd, grid: Grid) -> None:
    plane.start(0)
    plane.group("tp").all_reduce(torch.ones(1, 4))
    if plane.rank == 1:
        plane.abort("rank 9 ran out of memory")
    tp = plane.group("tp")
    broken(plane, refused(PlaneError, lambda: tp.all_reduce(ONES), "rank 9 ran out of memory"))


def _other_stage(plane: LayerEnd, grid: Grid) -> None:
    """Stages are apart: what breaks one leaves the other alone."""
    plane.start(0)
    tp = plane.group("tp")
    tp.all_reduce(ONES)
    if plane.rank == 0:
        plane.abort("the first stage is gone")
    for _ in range(3):
        if plane.rank >= grid.tp:
            tp.all_reduce(ONES)
        else:
            refused(PlaneError, lambda: tp.all_reduce(ONES), "the first stage is gone")


def disagreements() -> list[Case]:
    found = [
        Case("crossed groups", Layout(tp=4, dp=2), _crossed, SHORT_S),
        Case("one absent", Layout(tp=3), functools.partial(_absent, (1,)), SHORT_S),
        Case("two absent", Layout(tp=3), functools.partial(_absent, (0, 2)), SHORT_S),
        Case("aborted", Layout(tp=3), _aborted),
        Case("other stage", Layout(pp=2, tp=2), _other_stage),
    ]
    for what in DIFFERENT:
        # Two ranks where the counts are written out for two.
        tp = 2 if what in ("scattered counts", "exchanged counts") else 3
        body = functools.partial(_mismatch, what)
        found.append(Case(f"different {what}", Layout(tp=tp), body, SHORT_S))
    return found
