"""Lies told about rows that lag behind their tokens; see `faulty`."""

from typing import Any

from aserve.core import planner
from aserve.core.compose import Composer
from aserve.core.group import Group
from aserve.core.message import Commit
from aserve.core.outbox import Outbox
from aserve.core.sequence import Sequence
from aserve.testing.draws import Drawer, Walk
from aserve.testing.stage import LegibleStage
from aserve.testing.swap import Swap


def token_before(swap: Swap) -> None:
    """The row is computed from the token before the one that was drawn last."""

    def last(right: Any, drawer: Drawer, seq: int) -> int:
        text = drawer._texts[seq]
        return text[-2] if text and len(text) > 1 else int(right(drawer, seq))

    swap.wrap(Drawer, "last", last)


def token_kept(swap: Swap) -> None:
    """Who drew a token is the only one to use it."""

    def drawn(right: Any, stage: LegibleStage, work: Any) -> dict[int, int]:
        told: dict[int, int] = right(stage, work)
        return told if stage._seat.is_leader else dict.fromkeys(told, 1)

    swap.wrap(LegibleStage, "_drawn", drawn)


def surplus_committed(swap: Swap) -> None:
    """The result of a row too many goes to the ranks like any other."""

    def leave(right: Any, composer: Composer, sequence: Sequence) -> None:
        composers[0] = composer
        right(composer, sequence)

    def land(right: Any, sequence: Sequence, rows: Any, result: Any) -> None:
        right(sequence, rows, result)
        if rows.is_lagging and result.error is None:
            commit = Commit(rows.seq, result.path, result.tokens, True)
            composers[0].outbox.commit(sequence.microbatch, commit)

    composers: dict[int, Composer] = {}
    swap.wrap(Composer, "remove", leave)
    swap.wrap(planner, "land", land)


def surplus_cached(swap: Swap) -> None:
    """The KV of a row too many counts as computed."""

    def land(right: Any, sequence: Sequence, rows: Any, result: Any) -> None:
        right(sequence, rows, result)
        if rows.is_lagging:
            sequence.computed_len = rows.start + 1

    swap.wrap(planner, "land", land)


def surplus_freed_early(swap: Swap) -> None:
    """A sequence that ended gives its pages back though a row too many still writes one."""

    def leave(right: Any, group: Group, sequence: Sequence, keep: bool) -> None:
        n_in_flight = sequence.in_flight
        if sequence.kv_len >= len(sequence.tokens) and n_in_flight == 1:
            sequence.in_flight = 0
        right(group, sequence, keep)
        sequence.in_flight = n_in_flight

    swap.wrap(Group, "leave", leave)


def rule_moved_twice(swap: Swap) -> None:
    """By the token drawn, and once more when it is committed."""

    def init(right: Any, walk: Walk, view: Any, generated: Any) -> None:
        right(walk, view, generated)
        if view.rows.is_lagging:
            walk.generated += walk.generated[-1:]

    swap.wrap(Walk, "__init__", init)


def drawn_beyond_the_end(swap: Swap) -> None:
    """Rows are planned behind a draw that is the last one that was asked for."""

    def add(right: Any, composer: Composer, lane: Any, sequence: Sequence) -> None:
        sequence.max_tokens += 1
        try:
            right(composer, lane, sequence)
        finally:
            sequence.max_tokens -= 1

    swap.wrap(Composer, "_add_lagging", add)


def commits_reversed(swap: Swap) -> None:
    def collect(right: Any, outbox: Outbox, microbatch: int) -> Any:
        for commits in outbox._commits[microbatch].values():
            commits.reverse()
        return right(outbox, microbatch)

    swap.wrap(Outbox, "collect", collect)
