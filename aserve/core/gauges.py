"""What steps tell of the machine: which of their times go to the sizer of chunks, which to that of
drafts.
"""

from aserve.core.draft_sizer import DraftSizer, Step
from aserve.core.lane import Composition
from aserve.core.merge import Flight
from aserve.core.message import Drafting
from aserve.core.sizer import ChunkSizer


class Gauges:
    """Asks the sizers before a step, and tells them after it."""

    def __init__(self, chunks: ChunkSizer, drafts: DraftSizer, lags: bool) -> None:
        self._chunks = chunks
        self._drafts = drafts
        self._lags = lags  # rows may, so that nobody waits for plans where nothing is drafted
        self.reset()

    def reset(self) -> None:
        self._behind_open: bool | None = None  # the last step was open; None: nobody wanted one

    def drafting(self, composition: Composition, n_busy: int) -> Drafting:
        lanes = composition.lanes
        n_cell = max([len(lane.cell) for lane in lanes])
        return self._drafts.choose(composition.n_draws, n_cell, lanes[0].rows_max, n_busy)

    def load(self, composition: Composition) -> tuple[float, float] | None:
        """What the group with most to do does, if the step's time says something of chunks."""
        if self._chunks.cost is None:
            return None
        loads = [self._chunks.load(lane.rows) for lane in composition.lanes if lane.n_chunks]
        return max([load for load in loads if load is not None], default=None)

    def departs(self, flight: Flight) -> None:
        if self._lags:
            flight.behind_open, self._behind_open = self._behind_open, flight.is_open

    def idle(self) -> None:
        """Nothing is in flight, and nobody wants anything: what comes next did not wait."""
        self._behind_open = None

    def measure(self, flight: Flight) -> None:
        """All ranks have reported it."""
        if self._chunks.profile_len:
            self._chunks.profiled(flight.micros)
            return
        if flight.load is not None:
            self._chunks.served(flight.load, flight.micros)
        if flight.n_chunks:
            return
        behind_open = flight.behind_open
        self._drafts.stepped(
            Step(
                flight.plan.drafting,
                flight.n_draws,
                flight.n_rows,
                sum(flight.stage_micros),
                flight.draft_micros,
                None if behind_open is None else flight.waited_micros,
                bool(behind_open),
            )
        )
