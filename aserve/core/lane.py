"""A step being composed: one lane a group, and what they come to."""

from aserve.core.group import Group
from aserve.core.message import LAGGING, NO_DRAFTING, Admit, Batch, Drafting, Rows
from aserve.core.replica import fold_admit, fold_drafting
from aserve.core.sequence import Sequence
from aserve.core.tree import NO_DRAFT, Draft, row_parents


class Lane:
    """What one group does in the step being composed."""

    def __init__(self, group: Group, cell: list[Sequence], rows_max: int) -> None:
        self.group = group
        self.cell = cell  # the group's sequences in this microbatch
        self.rows_max = rows_max
        self.rows_left = rows_max
        self.rows: list[Rows] = []
        self.scheduled: list[Sequence] = []
        self.numbers: list[int] = []  # for the digest
        self.n_decode = 0
        self.n_draws = 0  # sequences whose rows end with a draw
        self.n_trees = 0
        self.pages_reserved = -1  # for the group's running sequences; counted when first needed
        self.pages_spare = 0  # that rows of known tokens leave for those that lag
        self.n_chunks = 0
        self.share_left = 1.0  # of the step's time, for chunks, when their cost is known
        self.short = False  # somebody goes without rows, or went altogether, for want of pages

    def add(self, sequence: Sequence, n_rows: int, pages: tuple[int, ...]) -> None:
        """Plan the next `n_rows` known tokens of a sequence; `pages` are new to the ranks."""
        tokens, start = sequence.tokens, sequence.kv_len
        end = start + n_rows
        assert end <= len(tokens), sequence.seq
        work = tuple(tokens[start:end]) if n_rows > 1 else (tokens[start],)
        self._add(sequence, Rows(sequence.seq, start, work, (), end == len(tokens), pages))
        sequence.kv_len = end

    def add_lagging(self, sequence: Sequence, pages: tuple[int, ...]) -> None:
        """Plan the row of the token that is being drawn."""
        start = sequence.kv_len
        assert start >= len(sequence.tokens), sequence.seq
        self._add(sequence, Rows(sequence.seq, start, (LAGGING,), (), True, pages))
        sequence.kv_len = start + 1

    def add_tree(self, sequence: Sequence, draft: Draft, pages: tuple[int, ...]) -> None:
        """Plan the bonus token, and the draft below it."""
        start = sequence.kv_len
        assert start == len(sequence.tokens) - 1, sequence.seq
        tokens = (sequence.tokens[start], *draft.tokens)
        self._add(sequence, Rows(sequence.seq, start, tokens, row_parents(draft), True, pages))
        sequence.kv_len = start + 1

    def _add(self, sequence: Sequence, rows: Rows) -> None:
        n_rows, pages = len(rows.tokens), sequence.pages
        assert n_rows <= self.rows_left, sequence.seq
        assert rows.start + n_rows <= len(pages) * self.group.page_size, sequence.seq
        self.rows.append(rows)
        self.scheduled.append(sequence)
        tokens = sequence.tokens
        numbers = self.numbers
        numbers += (rows.seq, rows.start, len(tokens), tokens[-1], len(pages), pages[-1])
        if (n_new := len(rows.pages)) > 1:
            numbers += pages[-n_new:]
        if rows.parents:  # drafts are in nobody's known tokens
            numbers += (*rows.tokens, *rows.parents)
            self.n_trees += 1
        self.rows_left -= n_rows
        sequence.in_flight += 1
        self.n_draws += rows.sample
        sequence.draft = NO_DRAFT


class Composition:
    """A step before it has a number: the parts of a `StepPlan` and what the planner notes of it."""

    def __init__(self, microbatch: int, lanes: list[Lane]) -> None:
        self.microbatch = microbatch
        self.lanes = lanes
        self.admits: list[Admit] = []
        self.drafting: Drafting = NO_DRAFTING

    @property
    def n_draws(self) -> int:
        return sum([lane.n_draws for lane in self.lanes])

    @property
    def is_open(self) -> bool:
        """Whether the shape of the rows behind it is known only when it is reported: they may be a
        tree, or start where the path through one ends.
        """
        return self.drafting.tokens > 0 or any([lane.n_trees for lane in self.lanes])

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
        fold_drafting(numbers, self.drafting)
        return numbers

    def admit(self, sequence: Sequence, hit_pages: int) -> None:
        """The ranks hear of a sequence that was just given its pages."""
        self.admits.append(
            Admit(
                sequence.seq,
                tuple(sequence.tokens),
                sequence.prompt_len,
                sequence.kv_len,
                tuple(sequence.pages[:hit_pages]),
                sequence.sampling,
            )
        )
