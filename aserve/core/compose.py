"""One step's batches: decode rows first, then chunks of started prompts, then new sequences.

Policy lives in `admission`, pages in `group`; here they become the rows of one microbatch.
"""

from enum import Enum

from aserve.core.admission import NewTokenRatio, WaitingQueue, computed_by, still_waits, victim
from aserve.core.config import Schedule
from aserve.core.group import Group
from aserve.core.message import Admit, Batch, Rows
from aserve.core.outbox import Outbox
from aserve.core.replica import fold_admit
from aserve.core.sequence import NOT_IN_FLIGHT, Phase, Sequence

SCAN_MAX = 64  # waiting sequences passed over in one step because others compute what they need


class Verdict(Enum):
    ADMITTED = 0
    WAITS = 1  # for pages that a running sequence is computing: those behind it may go first
    FULL = 2  # nobody behind it may go first, or it would starve


class Lane:
    """What one group does in the step being composed."""

    def __init__(self, group: Group, cell: list[Sequence], rows_max: int) -> None:
        self.group = group
        self.cell = cell  # the group's running sequences in this microbatch
        self.rows_max = rows_max
        self.rows_left = rows_max
        self.rows: list[Rows] = []
        self.scheduled: list[Sequence] = []
        self.numbers: list[int] = []  # for the digest
        self.n_decode = 0
        self.pages_reserved = -1  # for the group's running sequences; counted when first needed
        self.retracted = False

    def add(self, sequence: Sequence, n_rows: int, pages: tuple[int, ...]) -> None:
        """Plan the next `n_rows` known tokens of a sequence; `pages` are new to the ranks."""
        tokens, start = sequence.tokens, sequence.kv_len
        n_tokens, end = len(tokens), start + n_rows
        assert end <= n_tokens, sequence.seq
        assert end <= len(sequence.pages) * self.group.page_size, sequence.seq
        work = sequence.work[:n_rows] if n_rows > 1 else (tokens[start],)
        self.rows.append(Rows(sequence.seq, start, work, (), end == n_tokens, pages))
        self.scheduled.append(sequence)
        self.numbers += (
            sequence.seq,
            start,
            n_tokens,
            tokens[-1],
            len(sequence.pages),
            sequence.pages[-1],
        )
        self.rows_left -= n_rows


class Composition:
    """A step before it has a number: the parts of a `StepPlan` and what the planner notes of it."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes
        self.admits: list[Admit] = []

    @property
    def scheduled(self) -> list[Sequence]:
        """In the order of the plan's rows."""
        if len(self.lanes) == 1:
            return self.lanes[0].scheduled
        return [sequence for lane in self.lanes for sequence in lane.scheduled]

    @property
    def n_rows(self) -> int:
        return sum(lane.rows_max - lane.rows_left for lane in self.lanes)

    def batches(self) -> tuple[Batch, ...]:
        return tuple([Batch(tuple(lane.rows)) for lane in self.lanes])

    def numbers(self) -> list[int]:
        numbers: list[int] = []
        for admit in self.admits:
            fold_admit(numbers, admit)
        for lane in self.lanes:
            numbers += lane.numbers
        return numbers


class Composer:
    """Fills steps. `cells[microbatch][group]` are the running sequences, in order of admission."""

    def __init__(
        self, groups: list[Group], in_flight_max: int, schedule: Schedule, outbox: Outbox
    ) -> None:
        n_cells = len(groups) * in_flight_max
        page_size = groups[0].page_size
        self.groups = groups
        self.in_flight_max = in_flight_max
        self.outbox = outbox
        self.rows_max = schedule.step_tokens // len(groups)  # of one group in one step
        assert self.rows_max >= page_size, (schedule.step_tokens, len(groups), page_size)
        # However many decode, a page's worth of rows is left for the first chunk: none starves.
        running_max = max(1, schedule.running_max // n_cells)
        self.cell_max = min(running_max, self.rows_max - page_size + 1)
        self.cells: list[list[list[Sequence]]] = [
            [[] for _ in groups] for _ in range(in_flight_max)
        ]
        self.queue = WaitingQueue()
        self.ratio = NewTokenRatio()
        self.n_retractions = 0

    @property
    def n_running(self) -> int:
        return sum(len(cell) for cells in self.cells for cell in cells)

    def compose(self, microbatch: int) -> Composition:
        """The next step of a microbatch none of whose sequences is in flight."""
        lanes = [
            Lane(group, cell, self.rows_max)
            for group, cell in zip(self.groups, self.cells[microbatch], strict=True)
        ]
        composition = Composition(lanes)
        for lane in lanes:
            if lane.cell:
                self._add_running(lane)
        if len(self.queue):
            self._add_waiting(microbatch, composition)
        if any(lane.n_decode for lane in lanes):
            self.ratio.decode()
        return composition

    def remove(self, sequence: Sequence) -> None:
        """A running sequence leaves its cell."""
        self.cells[sequence.microbatch][sequence.group].remove(sequence)
        if not self.n_running:
            self.ratio.idle()

    def _add_running(self, lane: Lane) -> None:
        group = lane.group
        if group.pages_available < len(lane.cell):
            self._make_room(lane)
        chunked: list[Sequence] = []
        for sequence in lane.cell:
            assert sequence.in_flight == NOT_IN_FLIGHT, sequence.seq
            kv_len = sequence.kv_len
            if len(sequence.tokens) - kv_len != 1:
                chunked.append(sequence)
            elif kv_len < len(sequence.pages) * group.page_size:
                lane.add(sequence, 1, ())
            elif group.pages_available:
                lane.add(sequence, 1, (group.grow(sequence),))
            else:
                # Pages of a finished sequence come back with the step that still writes them.
                assert group.leaving, sequence.seq
        lane.n_decode = len(lane.rows)
        for sequence in chunked:
            n_rows = self._chunk_len(lane, len(sequence.tokens) - sequence.kv_len, sequence.kv_len)
            if not n_rows:
                break
            lane.add(sequence, n_rows, ())

    def _chunk_len(self, lane: Lane, work_len: int, start: int) -> int:
        """All of the work if the budget allows, else up to the last page border within it."""
        if work_len <= lane.rows_left:
            return work_len
        end = start + lane.rows_left
        return max(0, end - end % lane.group.page_size - start)

    def _make_room(self, lane: Lane) -> None:
        """Retract until every decode row has its page."""
        group = lane.group
        while True:
            n_wanted = sum(s.kv_len == len(s.pages) * group.page_size for s in lane.cell)
            # Pages that are about to come back are worth a step's wait, and a sequence that runs
            # alone never is retracted: `Planner.add` saw that the pool holds all of it.
            if n_wanted <= group.pages_available or group.leaving:
                return
            assert len(group.running) > 1, "a lone sequence outgrew the pool"
            self._retract(victim(lane.cell))
            lane.retracted = True

    def _retract(self, sequence: Sequence) -> None:
        group = self.groups[sequence.group]
        self.cells[sequence.microbatch][sequence.group].remove(sequence)
        self.outbox.drop(sequence, done=False)
        group.leave(sequence, keep=True)
        sequence.enter(Phase.WAITING)
        self.queue.put_first(sequence)
        self.ratio.retract(list(group.running.values()))
        self.n_retractions += 1

    def _add_waiting(self, microbatch: int, composition: Composition) -> None:
        n_all = self.n_running + len(self.queue)
        share = -(-n_all // self.in_flight_max)  # so that microbatches fill evenly
        n_here = sum(len(lane.cell) for lane in composition.lanes)
        n_passed_over = 0
        admitted: list[Sequence] = []
        for sequence in self.queue:
            if n_here >= share or not self._open_lanes(composition):
                break
            verdict = Verdict.WAITS
            if not still_waits(self.groups, sequence):
                verdict = self._try(sequence, composition)
            if verdict == Verdict.ADMITTED:
                sequence.microbatch = microbatch
                admitted.append(sequence)
                n_here += 1
            elif verdict == Verdict.WAITS and n_passed_over < SCAN_MAX:
                n_passed_over += 1
            else:
                break
        for sequence in admitted:
            self.queue.remove(sequence)

    def _open_lanes(self, composition: Composition) -> list[Lane]:
        """Lanes that may take a sequence, the least loaded group first."""
        lanes = [
            lane
            for lane in composition.lanes
            if lane.rows_left > 0 and len(lane.cell) < self.cell_max and not lane.retracted
        ]
        lanes.sort(key=lambda lane: len(lane.group.running))  # stable: then by index
        return lanes

    def _try(self, sequence: Sequence, composition: Composition) -> Verdict:
        for lane in self._open_lanes(composition):
            group = lane.group
            hit = group.hit(sequence)
            hit_pages = 0 if hit is None else hit.depth
            other = computed_by(group, sequence, hit)
            if other is not None:
                sequence.waits_for = other
                sequence.wait_pages = hit_pages + 1
                return Verdict.WAITS
            start = hit_pages * group.page_size
            n_rows = self._chunk_len(lane, len(sequence.tokens) - start, start)
            # A lock walks the whole path, so who waits for memory is refused before it if possible.
            if n_rows and self._fits(lane, sequence, hit_pages):
                group.lock(sequence, hit)
                if self._fits(lane, sequence, hit_pages):
                    self._start(sequence, lane, n_rows, composition)
                    return Verdict.ADMITTED
                group.unlock(sequence)
        return Verdict.FULL

    def _fits(self, lane: Lane, sequence: Sequence, hit_pages: int) -> bool:
        if lane.pages_reserved < 0:
            lane.pages_reserved = self.ratio.pages_reserved(lane.group)
        return self.ratio.fits(lane.group, sequence, hit_pages, lane.pages_reserved)

    def _start(self, sequence: Sequence, lane: Lane, n_rows: int, composition: Composition) -> None:
        hit_pages = lane.group.place(sequence)
        lane.pages_reserved += self.ratio.pages_wanted(lane.group, sequence)
        sequence.enter(Phase.RUNNING)
        lane.cell.append(sequence)
        if sequence.cached_len < 0:
            sequence.cached_len = min(sequence.kv_len, sequence.prompt_len)
        composition.admits.append(
            Admit(
                sequence.seq,
                tuple(sequence.tokens),
                sequence.prompt_len,
                sequence.kv_len,
                tuple(sequence.pages[:hit_pages]),
                sequence.sampling,
            )
        )
        lane.add(sequence, n_rows, tuple(sequence.pages[hit_pages:]))
