"""One step's batches: decode rows first, then chunks of started prompts, then new sequences.

Policy lives in `admission`, pages in `group`; here they become the rows of one microbatch.
"""

from enum import Enum

from aserve.core.admission import NewTokenRatio, WaitingQueue, computed_by, still_waits, victim
from aserve.core.config import Schedule
from aserve.core.depth import Depth
from aserve.core.group import Group
from aserve.core.lane import Composition, Lane
from aserve.core.message import NO_DRAFTING, Drafting
from aserve.core.outbox import Outbox
from aserve.core.sequence import NO_MICROBATCH, Phase, Sequence
from aserve.core.sizer import ChunkSizer
from aserve.core.tree import cut

SCAN_MAX = 64  # waiting sequences passed over in one step because others compute what they need


class Verdict(Enum):
    ADMITTED = 0
    WAITS = 1  # for pages that a running sequence is computing: those behind it may go first
    FULL = 2  # nobody behind it may go first, or it would starve


class Composer:
    """Fills steps. `cells[microbatch][group]` are the sequences that draw in that microbatch, in
    the order in which they joined it; those that only prefill are their group's.
    """

    def __init__(
        self,
        groups: list[Group],
        depth: Depth,
        schedule: Schedule,
        outbox: Outbox,
        drafting: Drafting,
        sizer: ChunkSizer,
    ) -> None:
        page_size = groups[0].page_size
        self.groups = groups
        self.microbatches, self.lag_max = depth
        self.outbox = outbox
        self.draft_max = drafting.tokens
        self.sizer = sizer
        self.rows_max = schedule.step_tokens // len(groups)  # of one group in one step
        assert self.rows_max >= page_size, (schedule.step_tokens, len(groups), page_size)
        running_max = max(1, schedule.running_max // len(groups))  # of one group
        # However many decode, a page's worth of rows is left for the first chunk: none starves.
        # The cells of a group together have room for all that run, so as long as one prefills,
        # some cell has room for it, and rows for a page of it.
        self.cell_max = min(-(-running_max // self.microbatches), self.rows_max - page_size + 1)
        self.running_max = min(running_max, self.cell_max * self.microbatches)
        self.queue = WaitingQueue()
        self.ratio = NewTokenRatio(drafting.tokens)
        self.n_retractions = 0
        self.reset()

    def reset(self) -> None:
        """Nobody is in a microbatch."""
        self.cells: list[list[list[Sequence]]] = [
            [[] for _ in self.groups] for _ in range(self.microbatches)
        ]

    @property
    def n_running(self) -> int:
        return sum([len(group.running) for group in self.groups])

    @property
    def n_busy(self) -> int:
        """Microbatches in which somebody draws."""
        return sum([any(cells) for cells in self.cells])

    def compose(self, microbatch: int) -> Composition:
        """The next step of a microbatch that is not in flight."""
        lanes = [
            Lane(group, cell, self.rows_max)
            for group, cell in zip(self.groups, self.cells[microbatch], strict=True)
        ]
        composition = Composition(microbatch, lanes)
        for lane in lanes:
            if lane.cell:
                self._add_decodes(lane)
            if self.sizer.cost is not None:
                lane.share_left = self.sizer.share_beside(lane.rows)
            if lane.group.prefilling:
                self._add_chunks(lane, microbatch)
        if len(self.queue):
            self._add_waiting(composition)
        if any([lane.n_decode for lane in lanes]):
            self.ratio.decode()
        return composition

    def remove(self, sequence: Sequence) -> None:
        """A running sequence leaves its microbatch, if it had joined one."""
        if sequence.microbatch != NO_MICROBATCH:
            self.cells[sequence.microbatch][sequence.group].remove(sequence)

    def retract(self, sequence: Sequence) -> None:
        """A running sequence gives up its pages and waits, before all others of its class."""
        group = self.groups[sequence.group]
        self.remove(sequence)
        self.outbox.drop(sequence, done=False)
        group.leave(sequence, keep=True)
        sequence.enter(Phase.WAITING)
        self.queue.put_first(sequence)
        self.ratio.retract(list(group.running.values()))
        self.n_retractions += 1

    def audit(self) -> None:
        """Every running sequence either prefills or stands in one microbatch."""
        for index, group in enumerate(self.groups):
            joined = [sequence for cells in self.cells for sequence in cells[index]]
            assert all(group.running.get(sequence.seq) is sequence for sequence in joined)
            assert all(sequence.seq not in group.prefilling for sequence in joined)
            assert len(joined) + len(group.prefilling) == len(group.running)
            for microbatch, cells in enumerate(self.cells):
                assert all(sequence.microbatch == microbatch for sequence in cells[index])

    def _add_decodes(self, lane: Lane) -> None:
        group, page_size = lane.group, lane.group.page_size
        if group.pages_available < len(lane.cell):
            self._make_room(lane)
        if self.draft_max:
            self._cut_drafts(lane)
        if self.lag_max:
            lane.pages_spare = group.pages_available - self._pages_due(lane)
        for sequence in lane.cell:
            if sequence.n_drawing:
                self._add_lagging(lane, sequence)
                continue
            end = sequence.kv_len + 1 + len(sequence.draft.tokens)
            pages: tuple[int, ...] = ()
            if end > len(sequence.pages) * page_size:
                n_new = group.pages_for(end) - len(sequence.pages)
                if n_new > group.pages_available:
                    lane.short = True
                    assert group.leaving or group.yielding, sequence.seq
                    continue
                pages = tuple([group.grow(sequence) for _ in range(n_new)])
            if sequence.draft.tokens:
                lane.add_tree(sequence, sequence.draft, pages)
            else:
                lane.add(sequence, 1, pages)
        lane.n_decode = len(lane.rows)

    def _pages_due(self, lane: Lane) -> int:
        """Pages that rows of known tokens need: one each, where the last one is full."""
        size = lane.group.page_size
        return sum([not s.n_drawing and s.kv_len == len(s.pages) * size for s in lane.cell])

    def _add_lagging(self, lane: Lane, sequence: Sequence) -> None:
        """The row behind a draw in flight, unless that draw is the last one anyway.

        It may turn out to be one row too many, so nobody goes without a page for it, and nobody
        is retracted: it can wait until its token is known.
        """
        group, n_drawing = lane.group, sequence.n_drawing
        if n_drawing > self.lag_max or sequence.seq in group.yielding:
            return
        if sequence.n_generated + n_drawing >= sequence.max_tokens:
            return
        pages: tuple[int, ...] = ()
        if sequence.kv_len == len(sequence.pages) * group.page_size:
            if lane.pages_spare < 1:
                lane.short = True
                return
            lane.pages_spare -= 1
            pages = (group.grow(sequence),)
        lane.add_lagging(sequence, pages)

    def _make_room(self, lane: Lane) -> None:
        """Retract until every decode row has its page, or until enough has been told to yield.

        Why this ends. Whoever goes, goes because a running sequence, of whatever microbatch, needs
        a page for its next row. Neither admission (`NewTokenRatio.fits`) nor drafts take pages
        that such rows need, so the page becomes a row, and the row a token; or the one in need
        went itself, and comes back with that page and draws with its last chunk. So each
        retraction is paid for with a token, and there are only so many to draw: two microbatches
        cannot retract each other's sequences for ever. Who runs alone is never retracted, and
        fits the pool: `Planner.add` saw to that.
        """
        group = lane.group
        while True:
            # Pages that are about to come back are worth a wait: what holds them is in flight.
            if self._pages_due(lane) <= group.pages_available or group.leaving or group.yielding:
                return
            assert len(group.running) > 1, "a lone sequence outgrew the pool"
            sequence = victim(group.running.values())
            if sequence.in_flight:  # it is planned no more, and goes when it landed
                group.yielding[sequence.seq] = sequence
            else:
                self.retract(sequence)
            lane.short = True

    def _cut_drafts(self, lane: Lane) -> None:
        """Fit drafts to what is left: of rows, half at most if prompts wait; of pages, those that
        no running sequence needs for its next row.
        """
        group, page_size = lane.group, lane.group.page_size
        drafted = [sequence for sequence in lane.cell if sequence.draft.tokens]
        rows = lane.rows_left - len(lane.cell)
        if group.prefilling or len(self.queue):
            rows = min(rows // 2, rows - page_size)
        pages = group.pages_available
        if drafted:
            running = group.running.values()
            pages -= sum([s.kv_len == len(s.pages) * page_size for s in running])
        for place, sequence in enumerate(drafted):
            root_end = sequence.kv_len + 1
            n_held = max(len(sequence.pages), group.pages_for(root_end))
            n_max = min(
                max(0, rows) // (len(drafted) - place),
                max(0, n_held + max(0, pages)) * page_size - root_end,
            )
            # The last token drawn never gets KV, so no path of rows can be longer than the rest.
            depth_max = sequence.max_tokens - sequence.n_generated - 1
            n_drafted = len(sequence.draft.tokens)
            sequence.draft = cut(sequence.draft, n_max, depth_max)
            n_rows = len(sequence.draft.tokens)
            if n_rows < n_drafted:
                sequence.asked = NO_DRAFTING
            rows -= n_rows
            pages -= max(0, group.pages_for(root_end + n_rows) - n_held)

    def _add_chunks(self, lane: Lane, microbatch: int) -> None:
        """The next chunks of prompts begun, also while their chunks before are in flight."""
        group = lane.group
        for sequence in list(group.prefilling.values()):
            if sequence.seq in group.yielding:
                continue
            work_len = len(sequence.tokens) - sequence.kv_len
            n_rows = self._chunk_len(lane, sequence, sequence.kv_len)
            if not n_rows:
                break
            if n_rows < work_len:
                self._add_chunk(lane, sequence, n_rows, ())
            elif self._has_share(lane, len(group.running)):
                self._add_chunk(lane, sequence, n_rows, ())
                del group.prefilling[sequence.seq]
                self._join(sequence, lane, microbatch)
            # Else it joins another microbatch: as long as one who runs is in none, one has less
            # than its share.

    def _join(self, sequence: Sequence, lane: Lane, microbatch: int) -> None:
        """With its last chunk a sequence comes to a microbatch, and stays."""
        sequence.microbatch = microbatch
        lane.cell.append(sequence)

    def _add_chunk(
        self, lane: Lane, sequence: Sequence, n_rows: int, pages: tuple[int, ...]
    ) -> None:
        lane.n_chunks += 1
        if self.sizer.cost is not None:
            lane.share_left -= self.sizer.share(sequence.chunk_base, sequence.kv_len, n_rows)
        lane.add(sequence, n_rows, pages)

    def _chunk_len(self, lane: Lane, sequence: Sequence, start: int) -> int:
        """All of the work if the budget allows, else up to the last page border within it."""
        rows = lane.rows_left
        if self.sizer.cost is not None:
            timed = self.sizer.rows(self._chunk_base(sequence, start), start, lane.share_left)
            if not lane.n_chunks:  # however long decodes take, the first chunk goes on
                timed = max(timed, lane.group.page_size)
            rows = min(rows, timed)
        work_len = len(sequence.tokens) - start
        if work_len <= rows:
            return work_len
        end = start + rows
        return max(0, end - end % lane.group.page_size - start)

    def _chunk_base(self, sequence: Sequence, start: int) -> int:
        """The length of a prompt's first chunk; settled when it begins."""
        if sequence.phase == Phase.WAITING:
            bases = sequence.chunk_bases
            if start not in bases:
                bases[start] = self.sizer.base(start, len(sequence.tokens))
            sequence.chunk_base = bases[start]
        return sequence.chunk_base

    def _add_waiting(self, composition: Composition) -> None:
        n_passed_over = 0
        admitted: list[Sequence] = []
        for sequence in self.queue:
            lanes = self._open_lanes(composition)
            if not lanes:
                break
            verdict = Verdict.WAITS
            if not still_waits(self.groups, sequence):
                verdict = self._try(sequence, lanes, composition)
            if verdict == Verdict.ADMITTED:
                admitted.append(sequence)
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
            if lane.rows_left > 0
            and len(lane.group.running) < self.running_max
            and not (lane.short or lane.group.yielding)
        ]
        lanes.sort(key=lambda lane: len(lane.group.running))  # stable: then by index
        return lanes

    def _try(self, sequence: Sequence, lanes: list[Lane], composition: Composition) -> Verdict:
        for lane in lanes:
            group = lane.group
            hit = group.hit(sequence)
            hit_pages = 0 if hit is None else hit.depth
            other = computed_by(group, sequence, hit)
            if other is not None:
                sequence.waits_for = other
                sequence.wait_pages = hit_pages + 1
                return Verdict.WAITS
            start = hit_pages * group.page_size
            work_len = len(sequence.tokens) - start
            n_rows = self._chunk_len(lane, sequence, start)
            if n_rows == work_len and not self._has_share(
                lane, self._n_expected(lane, sequence, composition)
            ):
                continue
            # A lock walks the whole path, so who waits for memory is refused before it if possible.
            if n_rows and self._fits(lane, sequence, hit_pages):
                group.lock(sequence, hit)
                if self._fits(lane, sequence, hit_pages):
                    self._start(sequence, lane, n_rows, composition)
                    return Verdict.ADMITTED
                group.unlock(sequence)
        return Verdict.FULL

    def _has_share(self, lane: Lane, n_expected: int) -> bool:
        """Whether a sequence that draws may join this microbatch, rather than the next.

        Microbatches fill evenly: of `n_expected` sequences of the group, each takes its share.
        """
        n_here = len(lane.cell)
        if n_here >= self.cell_max:
            return False
        share, n_larger = divmod(n_expected, self.microbatches)
        if n_here != share:
            return n_here < share
        index = lane.group.index
        return sum([len(cells[index]) > share for cells in self.cells]) < n_larger

    def _n_expected(self, lane: Lane, sequence: Sequence, composition: Composition) -> int:
        """Sequences that will run in the group soon: those who do, and the group's part of those
        who wait, as far as there is room for more like `sequence`, the first of them.
        """
        group = lane.group
        if self.microbatches == 1:
            return len(group.running) + 1
        n_waiting = -(-(len(self.queue) - len(composition.admits)) // len(self.groups))
        room = group.pages_available - self._pages_reserved(lane)
        n_fitting = max(1, room // self.ratio.pages_future(group, sequence))
        return len(group.running) + min(n_waiting, n_fitting)

    def _pages_reserved(self, lane: Lane) -> int:
        if lane.pages_reserved < 0:
            lane.pages_reserved = self.ratio.pages_reserved(lane.group)
        return lane.pages_reserved

    def _fits(self, lane: Lane, sequence: Sequence, hit_pages: int) -> bool:
        return self.ratio.fits(lane.group, sequence, hit_pages, self._pages_reserved(lane))

    def _start(self, sequence: Sequence, lane: Lane, n_rows: int, composition: Composition) -> None:
        group = lane.group
        hit_pages = group.place(sequence)
        lane.pages_reserved += self.ratio.pages_wanted(group, sequence)
        sequence.enter(Phase.RUNNING)
        if sequence.cached_len < 0:
            sequence.cached_len = min(sequence.kv_len, sequence.prompt_len)
        composition.admit(sequence, hit_pages)
        if sequence.kv_len + n_rows == len(sequence.tokens):
            self._join(sequence, lane, composition.microbatch)
        else:
            group.prefilling[sequence.seq] = sequence
        self._add_chunk(lane, sequence, n_rows, tuple(sequence.pages[hit_pages:]))
