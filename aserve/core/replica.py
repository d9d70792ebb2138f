"""A rank's copy of the bookkeeping: a pure function of the plan log, asserting all it reads.

The planner does not share this code: it folds its own state into its own digest, so that equal
digests mean that two implementations agree.
"""

from array import array
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from msgspec.msgpack import Decoder, encode

from aserve.core.message import Admit, Commit, Drafting, Rows, Sampling, StepPlan
from aserve.core.tree import depths, moved

_sampling_decoder = Decoder(Sampling)


def fold(digest: int, numbers: Iterable[int]) -> int:
    """The digest (u32) after more numbers (i64): CRC-32 of their little-endian bytes so far."""
    return crc32(array("q", numbers), digest)


def fold_admit(numbers: list[int], admit: Admit) -> None:
    """What a starting sequence adds to the digest."""
    numbers += (admit.seq, admit.kv_len, admit.prompt_len, len(admit.tokens), len(admit.pages))
    numbers += admit.tokens
    numbers += admit.pages
    # As it would be after a journey: an int that stands for a float is one no more.
    sampling = _sampling_decoder.decode(encode(admit.sampling))
    numbers.append(crc32(encode(sampling)))


def fold_commit(numbers: list[int], commit: Commit) -> None:
    """What a commit adds: drafts accepted and KV moved. A token alone shows in the next rows."""
    tokens, path = commit.tokens, commit.path
    if len(tokens) > 1 or path[-1] != len(path) - 1:
        numbers += (commit.seq, *path, *tokens)


def fold_drafting(numbers: list[int], drafting: Drafting) -> None:
    """The size of a step's drafts; where there are none nothing is added."""
    if drafting.tokens:
        numbers += (drafting.depth, drafting.topk, drafting.tokens)


class SequenceState:
    """One sequence on a rank; lists grow at the end only, so indices into them stay good.

    `kv_len` rows of known tokens were planned: they are in the pool when later rows read them.
    """

    __slots__ = (
        "drawing",
        "group",
        "kv_len",
        "pages",
        "prompt_len",
        "sampling",
        "seq",
        "tokens",
    )

    def __init__(self, admit: Admit) -> None:
        self.seq = admit.seq
        self.tokens = list(admit.tokens)
        self.prompt_len = admit.prompt_len
        self.kv_len = admit.kv_len
        self.pages = list(admit.pages)
        self.sampling: Sampling = admit.sampling
        self.group = -1  # told by its first rows
        # Start, and number of known tokens, of the rows whose draws have not been committed.
        self.drawing: list[tuple[int, int]] = []

    @property
    def n_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


class RowsView:
    """One `Rows` beside the state it works on; `group` is the batch it stands in."""

    __slots__ = ("group", "page_size", "rows", "state")

    def __init__(self, state: SequenceState, rows: Rows, group: int, page_size: int) -> None:
        self.state = state
        self.rows = rows
        self.group = group
        self.page_size = page_size

    @property
    def start(self) -> int:
        return self.rows.start

    @property
    def n_rows(self) -> int:
        return len(self.rows.tokens)

    @property
    def kv_len(self) -> int:
        """KV length including these rows."""
        return self.rows.start + len(self.rows.tokens)

    def slots(self) -> list[int]:
        """Where each row's KV goes: page * page_size + offset."""
        pages, size = self.state.pages, self.page_size
        start = self.rows.start
        if len(self.rows.tokens) == 1:
            return [pages[start // size] * size + start % size]
        return [
            pages[at // size] * size + at % size
            for at in range(start, start + len(self.rows.tokens))
        ]

    def positions(self) -> list[int]:
        """Each row's position: start + depth in the tree of rows."""
        start, parents = self.rows.start, self.rows.parents
        if not parents:
            return list(range(start, start + len(self.rows.tokens)))
        return [start + depth for depth in depths(parents)]


class KvMove(NamedTuple):
    """KV of a group's pool to copy before a step's rows are written, pair by pair."""

    seq: int
    group: int
    slots_from: tuple[int, ...]
    slots_to: tuple[int, ...]


class Applied(NamedTuple):
    """What a plan asks of a rank: first the moves, then the rows; groups in order."""

    views: tuple[RowsView, ...]
    moves: tuple[KvMove, ...]


class Replica:
    """Every sequence that a rank holds; `digest` covers the whole log applied so far."""

    def __init__(self, page_size: int) -> None:
        assert page_size >= 1, page_size
        self.page_size = page_size
        self.sequences: dict[int, SequenceState] = {}
        self.digest = 0
        self.step = -1

    def apply(self, plan: StepPlan) -> Applied:
        """Bring the state up to `plan`; what to do for it."""
        assert plan.step == self.step + 1, (plan.step, self.step)
        self.step = plan.step
        numbers: list[int] = [plan.step, plan.microbatch]
        moves: list[KvMove] = []
        for commit in plan.commits:
            self._commit(commit, moves)
            fold_commit(numbers, commit)
        for seq in plan.drops:
            state = self.sequences.pop(seq)
            numbers += (seq, state.kv_len, len(state.tokens))
        assert not plan.moves, "pages move only with speculation and host tiers"
        for admit in plan.admits:
            self._admit(admit)
            fold_admit(numbers, admit)
        views = self._views(plan, numbers)
        fold_drafting(numbers, plan.drafting)
        self.digest = fold(self.digest, numbers)
        return Applied(views, tuple(moves))

    def _admit(self, admit: Admit) -> None:
        assert admit.seq not in self.sequences, admit.seq
        assert 0 < admit.prompt_len <= len(admit.tokens), admit.seq
        assert 0 <= admit.kv_len < len(admit.tokens), admit.seq
        assert admit.kv_len == len(admit.pages) * self.page_size, admit.seq
        self.sequences[admit.seq] = SequenceState(admit)

    def _commit(self, commit: Commit, moves: list[KvMove]) -> None:
        state, path = self.sequences[commit.seq], commit.path
        assert state.drawing, commit.seq
        start, n_known = state.drawing.pop(0)
        n_accepted = len(path) - n_known
        if n_accepted:
            assert n_known == 1, commit.seq  # only trees leave rows out
            assert n_accepted > 0, commit.seq
            assert not state.drawing, commit.seq  # no row lags behind a tree
            slots_from, slots_to = moved(path, start)
            if slots_from:
                at = [self._slots(state, places) for places in (slots_from, slots_to)]
                moves.append(KvMove(commit.seq, state.group, *at))
        state.kv_len += n_accepted
        state.tokens += commit.tokens
        assert path[0] == 0, commit.seq
        assert state.kv_len <= len(state.pages) * self.page_size, commit.seq
        n_work = len(state.tokens) + len(state.drawing) - state.kv_len
        assert n_work == 1 or (commit.done and n_work == 0), commit.seq

    def _slots(self, state: SequenceState, places: list[int]) -> tuple[int, ...]:
        pages, size = state.pages, self.page_size
        return tuple([pages[place // size] * size + place % size for place in places])

    def _views(self, plan: StepPlan, numbers: list[int]) -> tuple[RowsView, ...]:
        sequences, size = self.sequences, self.page_size
        views: list[RowsView] = []
        for group, batch in enumerate(plan.batches):
            for rows in batch.rows:
                state = sequences[rows.seq]
                tokens, pages, start = state.tokens, state.pages, rows.start
                n_rows, n_tokens = len(rows.tokens), len(tokens)
                pages += rows.pages
                assert start == state.kv_len, rows.seq
                assert start + n_rows <= len(pages) * size, rows.seq
                assert state.group == group or state.group < 0, rows.seq
                n_lagging = len(state.drawing)
                assert bool(n_lagging) == rows.is_lagging, rows.seq
                state.group = group
                n_known = n_rows
                if n_lagging:
                    assert n_rows == 1, rows.seq
                    assert start == n_tokens + n_lagging - 1, rows.seq
                elif n_rows == 1:
                    assert rows.tokens[0] == tokens[start], rows.seq
                elif rows.parents:
                    n_known = 1
                    _check_tree(rows, tokens)
                else:
                    assert rows.tokens == tuple(tokens[start : start + n_rows]), rows.seq
                state.kv_len = start + n_known
                assert rows.sample == (state.kv_len == n_tokens + n_lagging), rows.seq
                if rows.sample:
                    state.drawing.append((start, n_known))
                numbers += (rows.seq, start, n_tokens, tokens[-1], len(pages), pages[-1])
                if len(rows.pages) > 1:
                    numbers += rows.pages
                if rows.parents:
                    numbers += (*rows.tokens, *rows.parents)
                views.append(RowsView(state, rows, group, size))
        return tuple(views)


def _check_tree(rows: Rows, tokens: list[int]) -> None:
    """A tree hangs below the last known token, parents before children."""
    assert rows.start == len(tokens) - 1, rows.seq
    assert rows.tokens[0] == tokens[-1], rows.seq
    assert len(rows.parents) == len(rows.tokens), rows.seq
    assert rows.parents[0] == -1, rows.seq
    assert all(0 <= parent <= row for row, parent in enumerate(rows.parents[1:])), rows.seq
