"""The state behind dynamic chunks: a profile of the first stage, then what serving shows of it.

It sees row counts and microseconds of reports, nothing else; the arithmetic is `chunk`'s.
"""

from collections import deque
from collections.abc import Iterable

from aserve.core.chunk import Bounds, Cost, best_base, fit, predict, slope
from aserve.core.config import Schedule
from aserve.core.layout import Grid
from aserve.core.message import Rows
from aserve.core.pages import CacheSpec

PROFILE_STEPS = 128
SERVED_MAX = 256  # steps with history that are remembered
REFIT_STEPS = 32


def profile_lengths(base: int, context_len: int, pool_len: int) -> list[int]:
    """Rows of the profile's steps, the longest first: it also pays for what is cold."""
    longest = min(base * 5 // 4, context_len, pool_len)
    step = max(1, longest // PROFILE_STEPS)
    lengths = [longest - place * step for place in range(PROFILE_STEPS)]
    return [length for length in lengths if length > 0]


def open_sizer(schedule: Schedule, cache: CacheSpec, grid: Grid, context_len: int) -> "ChunkSizer":
    """With a profile before it if chunks are to be dynamic and there is a pipeline to fill."""
    base = schedule.step_tokens // grid.dp
    lengths: list[int] = []
    if schedule.dynamic_chunks and grid.pp > 1:
        lengths = profile_lengths(base, context_len, cache.pages_total * cache.page_size)
    return ChunkSizer(Bounds(cache.page_size, context_len, base), grid.pp, lengths)


class ChunkSizer:
    """How many rows the next chunk of a prompt should have; without a cost as many as fit.

    `profile` are lengths of steps to measure before serving; none: chunks are of fixed length.
    """

    def __init__(self, bounds: Bounds, pp: int, profile: list[int]) -> None:
        self._bounds = bounds
        self._pp = pp
        self._profile = profile
        self._profiled: list[tuple[int, int]] = []
        self._served: deque[tuple[float, float, float]] = deque(maxlen=SERVED_MAX)
        self._n_served = 0
        self.cost: Cost | None = None
        self.warning = ""

    @property
    def profile_len(self) -> int:
        """Rows of the next step of the profile; 0: it is done."""
        done = len(self._profiled)
        return self._profile[done] if done < len(self._profile) else 0

    def profiled(self, micros: int) -> None:
        """What the step of `profile_len` rows took; the last one's gives a cost, or a warning."""
        self._profiled.append((self.profile_len, micros))
        if self.profile_len:
            return
        cost = fit(self._profiled)
        if isinstance(cost, str):
            self.warning = f"dynamic chunks are off: {cost}"
        else:
            self.cost = cost

    def share_beside(self, rows: Iterable[Rows]) -> float:
        """The share of a full step's time that these rows leave for chunks."""
        assert self.cost is not None
        spent = sum([self.cost.variable(one.start, len(one.tokens)) for one in rows])
        return 1 - spent / self.cost.variable(0, self._bounds.rows_max)

    def base(self, start: int, end: int) -> int:
        """The first chunk of a prompt whose rows from `start` to `end` are to be computed."""
        assert self.cost is not None
        if end - start <= self._bounds.align:
            return self._bounds.rows_max
        return best_base(self.cost, self._pp, start, end, self._bounds)

    def rows(self, base: int, start: int, share: float) -> int:
        """The next chunk of such a prompt at `start`, in a step of which so much is left."""
        rows, micros = self._whole(base, start)
        assert self.cost is not None
        if share * micros >= self.cost.variable(start, rows):
            return rows
        return int(self.cost.rows_within(start, max(share, 0.0) * micros))

    def share(self, base: int, start: int, rows: int) -> float:
        """The share of a step that these rows of such a prompt take."""
        assert self.cost is not None
        return self.cost.variable(start, rows) / self._whole(base, start)[1]

    def _whole(self, base: int, start: int) -> tuple[int, float]:
        """The next chunk with a step to itself, and the microseconds of that step.

        Deep in a long prompt even the shortest chunk may take longer than a full step of others.
        """
        assert self.cost is not None
        rows = predict(self.cost, base, start, self._bounds) or base
        full = self.cost.variable(0, self._bounds.rows_max)
        return rows, max(full, self.cost.variable(start, rows))

    def load(self, rows: Iterable[Rows]) -> tuple[float, float] | None:
        """Of a group's step with a chunk in it: its cost without history, and sum(history * rows).

        None: it has too few rows to tell anything.
        """
        cost = self.cost
        assert cost is not None
        n_rows, alone, behind = 0, cost.c, 0.0
        for one in rows:
            n_own = len(one.tokens)
            n_rows += n_own
            alone += cost.variable(0, n_own)
            behind += one.start * n_own
        return (alone, behind) if n_rows >= self._bounds.align else None

    def served(self, load: tuple[float, float], micros: int) -> None:
        """What such a step took: now and then it corrects what history is thought to cost."""
        if self.cost is None or micros <= 0:
            return
        self._served.append((*load, float(micros)))
        self._n_served += 1
        if self._n_served % REFIT_STEPS == 0:
            steepness = slope(self.cost, list(self._served))
            if steepness is not None:
                self.cost = self.cost._replace(d=steepness)

    def words(self) -> str:
        """For a doctor."""
        if self.profile_len:
            return f"profiling, step {len(self._profiled)} of {len(self._profile)}"
        if self.cost is None:
            return "fixed"
        a, b, c, d = self.cost
        return f"dynamic: {a:.4g} n^2 + {d:.4g} h n + {b:.4g} n + {c:.4g} us for n rows after h"
