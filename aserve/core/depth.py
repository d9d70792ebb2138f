"""How many plans may be unanswered, and what they are: microbatches, or rows whose token lags."""

from typing import NamedTuple

from aserve.core.config import Layout, Schedule


class Depth(NamedTuple):
    """Of each microbatch one plan is in flight, and up to `lag_max` more behind it."""

    microbatches: int
    lag_max: int  # draws without a report that a row may be planned behind

    @property
    def in_flight_max(self) -> int:
        return self.microbatches * (1 + self.lag_max)


def overlap_of(layout: Layout, schedule: Schedule) -> int:
    """`schedule.overlap`, or what None means: one plan ahead where there is one stage."""
    if schedule.overlap is not None:
        return schedule.overlap
    return int(layout.pp == 1)


def depth_of(layout: Layout, schedule: Schedule) -> Depth:
    """With one stage, values lag. Otherwise more microbatches fill the time: the token is drawn on
    the last stage and embedded on the first, which would have to wait for it.
    """
    overlap = overlap_of(layout, schedule)
    if layout.pp == 1:
        return Depth(1, overlap)
    return Depth(layout.pp + overlap, 0)
