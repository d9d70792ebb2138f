"""What became of drafts: how much of each the target said too. Counts; nothing decides here."""

import msgspec

from aserve.core.message import Result, Rows


class DraftStatistics(msgspec.Struct, frozen=True):
    """Counts since the start. A draft is one sequence's in one step, verified there.

    `accepted_lens[n]`: drafts of which n tokens stood in the text, for n up to the longest so far.
    `target_steps` counts draws with and without a draft: each gave one token, and those accepted.
    """

    drafts: int = 0
    drafted: int = 0  # tokens of them
    accepted: int = 0  # of those
    accepted_lens: tuple[int, ...] = ()
    target_steps: int = 0

    @property
    def accepted_at(self) -> tuple[int, ...]:
        """By position below the last known token: drafts whose token there was accepted."""
        lens = self.accepted_lens
        return tuple(sum(lens[depth:]) for depth in range(1, len(lens)))


class Acceptance:
    """The running counts behind DraftStatistics."""

    def __init__(self) -> None:
        self._drafted = 0
        self._accepted_lens: list[int] = []
        self._target_steps = 0

    def count(self, rows: Rows, result: Result) -> None:
        """A possible result of rows that drew."""
        self._target_steps += 1
        if not rows.parents:
            return
        n_accepted = len(result.path) - 1
        while len(self._accepted_lens) <= n_accepted:
            self._accepted_lens.append(0)
        self._accepted_lens[n_accepted] += 1
        self._drafted += len(rows.tokens) - 1

    def statistics(self) -> DraftStatistics:
        lens = self._accepted_lens
        return DraftStatistics(
            drafts=sum(lens),
            drafted=self._drafted,
            accepted=sum(length * times for length, times in enumerate(lens)),
            accepted_lens=tuple(lens),
            target_steps=self._target_steps,
        )
