"""Who proposes the next tokens, at the rank that leads a DP group on the last stage."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from aserve.core.message import Drafting, Result
from aserve.core.replica import RowsView
from aserve.core.tree import Draft
from aserve.core.verdict import known_rows
from aserve.models.regions import Region
from aserve.tensor.ops import KvLayer


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What one sequence's rows of a step came to.

    `path` are its rows that stay, from 0 on: all of a chunk, the accepted ones of a tree. Row
    `path[d]` stands at position `view.start + d`, and `tokens[d]` is the token after it: accepted,
    drawn, or the prompt's own. `first_row` is the place of row 0 among the group's rows of the
    step, in the plan's order. A draft is wanted below the last of `tokens` if `is_drawn`.
    """

    view: RowsView
    first_row: int
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    is_drawn: bool

    @classmethod
    def of(cls, view: RowsView, first_row: int, result: Result) -> "Kept":
        """What `view` came to by its result, which is no error."""
        next_at = view.start + 1
        n_given = known_rows(view.rows) - bool(result.tokens)  # rows whose next token was known
        given = view.state.tokens[next_at : next_at + n_given] if n_given else []
        tokens = (*given, *result.tokens)
        assert len(tokens) == len(result.path), (view.rows.seq, result.path, len(tokens))
        return cls(view, first_row, result.path, tokens, bool(result.tokens))


class Drafter(Protocol):
    """Keeps what it needs of each sequence until its drop; KV of its own lies in the slots of the
    sequence's pages."""

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        """A draft for each of `kept`, in its order; `NO_DRAFT` where none is wanted or known.

        Called in every step in which the group has rows, also if `drafting` asks for nothing: the
        rows are new to the drafter all the same. `features` are [rows of the group, ...] float32.
        """
        ...

    def drop(self, seq: int) -> None:
        """Forget a sequence, known or not."""
        ...


class DraftModel(Protocol):
    """What drafters are made of: weights, if they have any, that stay when ranks start anew."""

    @property
    def pages_beside(self) -> int:
        """Pages of its regions that no sequence owns, behind those of the pool."""
        ...

    def regions(self) -> tuple[Region, ...]:
        """KV in the slots of the sequences' pages, beside that of the target's layers."""
        ...

    def drafter(self, kv: Sequence[KvLayer]) -> Drafter:
        """One that knows no sequence yet; `kv` are the layers of `regions`, in their order."""
        ...
