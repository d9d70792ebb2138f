"""What drafts yield and what steps take, from samples: means that forget, over curves of a form.

A size or number of rows that was never measured is guessed from the nearest that was, by a form
that holds roughly: what is accepted grows like the logarithm of a tree, time like rows on a floor.
"""

from collections.abc import Sequence
from math import ceil, log2

from aserve.core.message import Drafting

LEVEL = 0.35  # accepted tokens by log2(1 + tokens) of a draft: of a fair drafter, until measured
LEVEL_LEAST = 0.02  # below it nothing can be said of sizes
FORM_CHANGE_MAX = 2.5  # by so much sizes differ from what the logarithm says at most
FLOOR_ROWS = 24.0  # a step of no row takes as long as so many rows add to it: until measured
FLOOR_ROWS_MAX = 1000.0
FLOOR_DRAWS = 16  # the same of making a level of drafts
OUTLIER = 2  # times what was expected; more than that counts as that
TRUSTED = 3  # samples from which on something is expected


class Mean:
    """A running mean: of all samples at first, later of the last `span` or so.

    It starts at `value`, which counts like `n` samples.
    """

    __slots__ = ("_span", "n", "value")

    def __init__(self, span: int, value: float = 0.0, n: float = 0) -> None:
        self._span = span
        self.value = value
        self.n = n

    def add(self, sample: float, weight: float = 1) -> None:
        self.n = min(self.n + weight, self._span)
        self.value += (sample - self.value) * weight / self.n

    def add_time(self, micros: float) -> None:
        """What else the machine did is not the step's: outliers are cut."""
        if self.n >= TRUSTED and self.value > 0:
            micros = min(micros, OUTLIER * self.value)
        self.add(micros)


class Yield:
    """Accepted tokens by size: a level, which follows the text, times a form that hardly moves.

    So what is seen of one size is believed of all, and a size that was not tried for long is not
    remembered from a text that was easier. A chain tells of all shorter ones too.
    """

    def __init__(self, sizes: Sequence[Drafting]) -> None:
        self._sizes = sizes
        self._level = Mean(24, LEVEL, 4)
        self._form = [Mean(64, log2(1 + size.tokens), 8) for size in sizes]
        self._drafted = [Mean(24, size.tokens, 2) for size in sizes]

    def accepted(self, at: int) -> float:
        """At least as many as of any smaller draft."""
        forms = [form.value for form in self._form[: at + 1]]
        return min(self._level.value * max(forms), self._sizes[at].depth)

    def drafted(self, at: int) -> float:
        return self._drafted[at].value

    def add(self, at: int, n_drafted: int, n_accepted: int) -> None:
        """Of a draft of a size that was asked for."""
        size, level = self._sizes[at], self._level.value
        for other, drafted in zip(self._sizes, self._drafted, strict=True):
            # Who made less than was asked for had no more; else it would have made any number.
            n_most = n_drafted if n_drafted < size.tokens else other.tokens
            drafted.add(min(n_most, other.tokens))
        self._level.add(n_accepted / self._form[at].value)
        if level < LEVEL_LEAST or not n_drafted:
            return
        for told in range(1, at + 1) if size.topk == 1 else (at,):
            form, log = self._form[told], log2(1 + self._sizes[told].tokens)
            # While next to nothing is accepted, that is the level's doing and says little of sizes.
            weight = min(1.0, level / LEVEL) ** 2
            form.add(min(n_accepted, self._sizes[told].depth) / level, weight)
            form.value = min(max(form.value, log / FORM_CHANGE_MAX), log * FORM_CHANGE_MAX)

    def words(self) -> str:
        expected = [
            f"{self.accepted(at):.2f} of {size.tokens}"
            for at, size in enumerate(self._sizes)
            if size.tokens
        ]
        return "accepted, as expected now: " + ", ".join(expected)


class Pace:
    """Microseconds of steps by rows, of making drafts by size, of waiting for plans."""

    def __init__(self, sizes: Sequence[Drafting]) -> None:
        self._sizes = sizes
        self._steps: dict[int, Mean] = {}  # by bucket of rows
        self._drafts: dict[int, Mean] = {}  # by size: for one unit of `_draft_form`
        self._waits = (Mean(24), Mean(24))  # behind a step that may lag, behind an open one

    def step(self, n_rows: float) -> float:
        """Without any sample in units of nothing: only ratios mean something then."""
        bucket = bucket_of(n_rows)
        if not self._steps:
            return FLOOR_ROWS + n_rows
        mean = self._steps.get(bucket)
        if mean is not None:
            return mean.value
        near = min(self._steps, key=lambda other: (abs(other - bucket), other))
        floor = self._floor_rows()
        return self._steps[near].value * (floor + rows_of(bucket)) / (floor + rows_of(near))

    def _floor_rows(self) -> float:
        """From the line through the fewest and the most rows that were measured."""
        few, many = min(self._steps), max(self._steps)
        if many < few + 2:  # less than twice as many
            return FLOOR_ROWS
        rise = self._steps[many].value - self._steps[few].value
        if rise <= 0:
            return FLOOR_ROWS_MAX
        n_few, n_many = rows_of(few), rows_of(many)
        floor = self._steps[few].value * (n_many - n_few) / rise - n_few
        return min(max(floor, 0.0), FLOOR_ROWS_MAX)

    def draft(self, at: int, n_draws: int) -> float:
        if not self._drafts:
            return 0.0
        mean = self._drafts.get(at)
        if mean is None:
            near = min(self._drafts, key=lambda other: (abs(other - at), -other))
            mean = self._drafts[near]
        return mean.value * self._draft_form(at, n_draws)

    def wait(self, behind_open: bool) -> float:
        return self._waits[behind_open].value

    def add_step(self, n_rows: int, micros: int) -> None:
        self._steps.setdefault(bucket_of(n_rows), Mean(16)).add_time(micros)

    def add_draft(self, at: int, n_draws: int, micros: int) -> None:
        mean = self._drafts.setdefault(at, Mean(16))
        mean.add_time(micros / self._draft_form(at, n_draws))

    def add_wait(self, behind_open: bool, micros: int) -> None:
        self._waits[behind_open].add_time(micros)

    def _draft_form(self, at: int, n_draws: int) -> int:
        size = self._sizes[at]
        return (1 + size.depth) * (FLOOR_DRAWS + n_draws * (1 + size.topk))


def bucket_of(n_rows: float) -> int:
    """Half octaves: rows up to 1, 2, 3, 4, 6, 8, 12, 16, 24 ... are in buckets 0, 2, 3, 4, 5 ..."""
    n_whole = max(1, ceil(n_rows))
    octave = (n_whole - 1).bit_length()
    return 2 * octave - (4 * n_whole <= 3 << octave)


def rows_of(bucket: int) -> int:
    """The most rows of a bucket."""
    octave, is_half = -(-bucket // 2), bucket % 2
    return (3 << octave) >> 2 if is_half else 1 << octave
