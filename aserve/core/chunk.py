"""How long the chunks of a prompt should be, so that each keeps a pipeline stage equally busy.

Pure arithmetic on a fitted cost of a step; who measures and when to refit is `sizer`'s.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import sqrt
from typing import NamedTuple

SAMPLES_MIN = 8  # of a fit, the first (cold) one not counted
SMOOTHING = 0.75  # how far a chunk goes from the base towards equal time
SHARE_LEAST = 4  # no chunk is shorter than this part of the base
ALIGN = 64  # rows; chunks are multiples of it, or of a page if that is more
CONTEXT_MARGIN = 100  # tokens of the context that chunks are not stretched into
CHUNKS_MAX = 512  # of one prompt; a base that would make more is not looked at

TimeOf = Callable[[int, int], float]  # (history length, rows) -> time of a chunk on one stage


class Cost(NamedTuple):
    """Microseconds of a stage for `rows` rows after `history` rows of the same sequence:

    a * rows^2 + d * history * rows + b * rows + c; a > 0, and d = 2 * a where attention is all
    that looks back.
    """

    a: float
    b: float
    c: float
    d: float

    def micros(self, history: int, rows: int) -> float:
        return self.variable(history, rows) + self.c

    def variable(self, history: int, rows: int) -> float:
        """Without what every step costs."""
        return (self.a * rows + self.d * history + self.b) * rows

    def rows_within(self, history: int, micros: float) -> float:
        """How many rows after `history` take so long, what every step costs not counted."""
        slope = self.d * history + self.b
        return (sqrt(slope * slope + 4 * self.a * micros) - slope) / (2 * self.a)


class Bounds(NamedTuple):
    """What a chunk must keep to whatever it costs; `rows_max` rows fit a step."""

    page_size: int
    context_len: int
    rows_max: int

    @property
    def align(self) -> int:
        return max(self.page_size, ALIGN)


def fit(samples: Sequence[tuple[int, int]]) -> Cost | str:
    """The cost through (rows, microseconds) of steps without history; a text if there is none.

    Least squares on [rows^2, rows, 1], in exact arithmetic, without the first sample, which paid
    for cold caches.
    """
    used = samples[1:]
    if len(used) < SAMPLES_MIN:
        return f"{len(used)} samples of step times, a fit needs {SAMPLES_MIN}"
    powers = [sum(rows**power for rows, _ in used) for power in range(5)]
    times = [sum(rows**power * micros for rows, micros in used) for power in range(3)]
    matrix = [[powers[4 - row - column] for column in range(3)] for row in range(3)]
    right = [times[2], times[1], times[0]]
    whole = _determinant(matrix)
    if whole == 0:
        return "samples of step times of fewer than 3 lengths"
    a, b, c = (float(Fraction(_replaced(matrix, column, right), whole)) for column in range(3))
    if a <= 0:
        return f"step times do not grow faster than prompts (a = {a:.3g} us): no chunk would shrink"
    return Cost(a, max(b, 0.0), c, 2 * a)


def _determinant(m: list[list[int]]) -> int:
    return (
        m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1])
        - m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0])
        + m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0])
    )


def _replaced(matrix: list[list[int]], column: int, right: list[int]) -> int:
    """Cramer's rule: the determinant with a column replaced."""
    rows = zip(matrix, right, strict=True)
    return _determinant([[*row[:column], value, *row[column + 1 :]] for row, value in rows])


def predict(cost: Cost, base: int, history: int, bounds: Bounds) -> int | None:
    """The next chunk of a prompt with `history` rows done, to take as long as its first of `base`.

    Solves cost(history + x) - cost(history) = cost(base) - cost(0), goes `SMOOTHING` of the way
    there from the base, not below `base / SHARE_LEAST`, in whole multiples of the alignment. None:
    no such chunk within bounds; take the base.
    """
    x = cost.rows_within(history, cost.variable(0, base))
    if x <= 0:
        return None
    smoothed = base + SMOOTHING * (x - base)
    # Where the exact value is whole, rounding must not cost a unit, and so an alignment.
    rows = max(int(smoothed + 1e-6), base // SHARE_LEAST)
    align = bounds.align
    rows = max(rows // align * align, align)
    most = min(bounds.context_len - history - CONTEXT_MARGIN, bounds.rows_max)
    rows = min(rows, most) // align * align
    return rows if rows >= align else None


def slope(cost: Cost, samples: Sequence[tuple[float, float, float]]) -> float | None:
    """The `d` that steps with history show; None: they do not tell.

    A sample is (what the cost says of a step without its history, the sum of history * rows over
    its sequences, microseconds). Least squares through the origin on the first two, so that a
    machine that is slower in service than in its profile is not taken for a steeper cost. Within
    a quarter and four times of 2 * a, as a few samples must not upset everything.
    """
    uu = uv = vv = uy = vy = 0.0
    for u, v, y in samples:
        uu, uv, vv = uu + u * u, uv + u * v, vv + v * v
        uy, vy = uy + u * y, vy + v * y
    whole = uu * vv - uv * uv
    if whole <= 1e-6 * uu * vv:
        return None
    speed, steepness = (uy * vv - vy * uv) / whole, (vy * uu - uy * uv) / whole
    if speed <= 0:
        return None
    return min(max(steepness / speed, cost.a / 2), 8 * cost.a)


def fixed_chunks(base: int, start: int, end: int) -> list[int]:
    """Lengths of equal chunks of the rows from `start` to `end`."""
    return [min(base, end - at) for at in range(start, end, base)]


def dynamic_chunks(cost: Cost, base: int, start: int, end: int, bounds: Bounds) -> list[int]:
    """Lengths of chunks of about equal time; at most CHUNKS_MAX, the rest of it in none."""
    chunks: list[int] = []
    while start < end and len(chunks) < CHUNKS_MAX:
        rows = predict(cost, base, start, bounds) or base
        chunks.append(min(rows, end - start))
        start += chunks[-1]
    return chunks


def best_base(cost: Cost, pp: int, start: int, end: int, bounds: Bounds) -> int:
    """The first chunk with which the rows from `start` to `end` are through `pp` stages soonest.

    Shorter chunks leave the stages behind less to wait for, but each step has its own cost.
    Looks at `rows_max` and at fractions of it; of equals takes the longest.
    """
    best, best_micros = bounds.rows_max, -1.0
    for eighths in (8, 6, 4, 3, 2, 1.5, 1, 0.75, 0.5):
        base = int(bounds.rows_max * eighths / 8)
        if base < bounds.align and base != bounds.rows_max:
            break
        chunks = dynamic_chunks(cost, base, start, end, bounds)
        if sum(chunks) < end - start:
            break
        times = [
            cost.micros(history, rows)
            for history, rows in zip(accumulate(chunks, initial=start), chunks, strict=False)
        ]
        micros = sum(times) + (pp - 1) * max(times)
        if best_micros < 0 or micros < best_micros:
            best, best_micros = base, micros
    return best


def pipeline_times(
    time_of: TimeOf, chunks: Sequence[int], pp: int
) -> tuple[float, tuple[float, ...]]:
    """Time to the first token of a prompt alone in `pp` equal stages, and how idle each stage is.

    A stage's wait is a share of the time between its first start and its last end, without the
    filling and the draining of the pipeline, which no length of chunks can avoid.
    """
    assert chunks, "no chunks"
    assert pp >= 1, pp
    free = [0.0] * pp  # when each stage is done with the chunks so far
    first_end = [0.0] * pp
    busy = 0.0
    history = 0
    first = time_of(0, chunks[0])
    for rows in chunks:
        time = time_of(history, rows)
        arrived = 0.0
        for stage in range(pp):
            free[stage] = arrived = max(free[stage], arrived) + time
            if history == 0:
                first_end[stage] = arrived
        busy += time
        history += rows
    spans = [end - (begun - first) for end, begun in zip(free, first_end, strict=True)]
    return free[-1], tuple([max(0.0, 1 - busy / span) for span in spans])
