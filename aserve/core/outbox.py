"""What the next plans must still tell the ranks about earlier steps: commits and drops."""

from aserve.core.message import Commit
from aserve.core.replica import fold_commit
from aserve.core.sequence import NO_MICROBATCH, Sequence


class Outbox:
    """A running sequence's commits wait for the next plan of its microbatch; a leaving one's go,
    with its drop, into the next plan of all: its pages may be somebody else's in it.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self.reset()

    def reset(self) -> None:
        """The ranks know nothing of anybody."""
        # By microbatch and sequence, in order: several where its rows lag.
        self._commits: list[dict[int, list[Commit]]] = [{} for _ in range(self._microbatches)]
        self._last_commits: list[Commit] = []
        self._drops: list[int] = []
        self._drop_numbers: list[int] = []  # for the digest

    def commit(self, microbatch: int, commit: Commit) -> None:
        self._commits[microbatch].setdefault(commit.seq, []).append(commit)

    def drop(self, sequence: Sequence, done: bool) -> None:
        """The ranks forget it. Call it before its pages are given back: the digest needs kv_len."""
        if sequence.microbatch != NO_MICROBATCH:
            commits = self._commits[sequence.microbatch].pop(sequence.seq, [])
            for last in commits[-1:]:
                commits[-1] = Commit(last.seq, last.path, last.tokens, done)
            self._last_commits += commits
        self._drops.append(sequence.seq)
        self._drop_numbers += (sequence.seq, sequence.kv_len, len(sequence.tokens))

    def collect(self, microbatch: int) -> tuple[tuple[Commit, ...], tuple[int, ...], list[int]]:
        """Commits, drops and their numbers for the next plan, of this microbatch."""
        waiting = self._commits[microbatch].values()
        commits = (*self._last_commits, *[commit for some in waiting for commit in some])
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
