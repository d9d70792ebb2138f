"""What the next plans must still tell the ranks about earlier steps: commits and drops."""

from aserve.core.message import Commit
from aserve.core.replica import fold_commit
from aserve.core.sequence import NO_MICROBATCH, Sequence


class Outbox:
    """A running sequence's commit waits for the next plan of its microbatch; a leaving one's goes,
    with its drop, into the next plan of all: its pages may be somebody else's in it.
    """

    def __init__(self, in_flight_max: int) -> None:
        self._in_flight_max = in_flight_max
        self.reset()

    def reset(self) -> None:
        """The ranks know nothing of anybody."""
        self._commits: list[dict[int, Commit]] = [{} for _ in range(self._in_flight_max)]
        self._last_commits: list[Commit] = []
        self._drops: list[int] = []
        self._drop_numbers: list[int] = []  # for the digest

    def commit(self, microbatch: int, commit: Commit) -> None:
        commits = self._commits[microbatch]
        assert commit.seq not in commits, commit.seq
        commits[commit.seq] = commit

    def drop(self, sequence: Sequence, done: bool) -> None:
        """The ranks forget it. Call it before its pages are given back: the digest needs kv_len."""
        if sequence.microbatch != NO_MICROBATCH:
            commit = self._commits[sequence.microbatch].pop(sequence.seq, None)
            if commit is not None:
                self._last_commits.append(Commit(commit.seq, commit.path, commit.tokens, done))
        self._drops.append(sequence.seq)
        self._drop_numbers += (sequence.seq, sequence.kv_len, len(sequence.tokens))

    def collect(self, microbatch: int) -> tuple[tuple[Commit, ...], tuple[int, ...], list[int]]:
        """Commits, drops and their numbers for the next plan, of this microbatch."""
        commits = (*self._last_commits, *self._commits[microbatch].values())
        numbers: list[int] = []
        for commit in commits:
            fold_commit(numbers, commit)
        numbers += self._drop_numbers
        drops = tuple(self._drops)
        self._commits[microbatch] = {}
        self._last_commits = []
        self._drops = []
        self._drop_numbers = []
        return commits, drops, numbers
