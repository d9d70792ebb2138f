"""What the grid of ranks is, as a table, and who is to blame when it breaks again and again.

Pure: no awaits, clocks or processes. `aserve.actors.supervisor` does what it says.
"""

from collections.abc import Iterable
from enum import StrEnum


class State(StrEnum):
    STARTING = "starting"  # for the first time: nobody has asked for anything yet
    SERVING = "serving"
    RESTARTING = "restarting"  # the ranks are being ended and started anew; requests wait
    FAILED = "failed"  # for good: every request ends with an error
    CLOSED = "closed"


class Event(StrEnum):
    STARTED = "started"  # every rank has loaded and joined
    BROKE = "broke"  # a rank died, ranks did not meet, or a digest differs
    GAVE_UP = "gave up"  # it broke too often without getting anywhere, or cannot go on at all
    CLOSE = "close"


# What is not listed is illegal.
TRANSITIONS: dict[State, dict[Event, State]] = {
    State.STARTING: {
        Event.STARTED: State.SERVING,
        Event.GAVE_UP: State.FAILED,  # no restart: what fails at once fails again
        Event.CLOSE: State.CLOSED,
    },
    State.SERVING: {
        Event.BROKE: State.RESTARTING,
        Event.GAVE_UP: State.FAILED,
        Event.CLOSE: State.CLOSED,
    },
    State.RESTARTING: {
        Event.STARTED: State.SERVING,
        Event.BROKE: State.RESTARTING,
        Event.GAVE_UP: State.FAILED,
        Event.CLOSE: State.CLOSED,
    },
    State.FAILED: {Event.CLOSE: State.CLOSED},
    State.CLOSED: {},
}


def step(state: State, event: Event) -> State:
    """The state after `event`."""
    after = TRANSITIONS[state].get(event)
    assert after is not None, f"{event} while {state}"
    return after


class Blame:
    """Counts breaks without progress: of the grid, and of each sequence in a step that broke.

    Progress of a sequence is a token: it then goes back to nothing. A sequence that stood in an
    unanswered step of `restarts_max + 1` breaks in a row, and got no token in between, is a
    suspect: the ranks die of what it asks for, or of its neighbours in the step, which nobody can
    tell apart from here. So that one poisoned request cannot keep all others from ever being
    answered, suspects are given up and the ranks get one more chance without them. The innocent
    among them lose an answer that they were not getting.

    Steps alone are no progress: the first steps of every restart only compute again what was lost.
    """

    def __init__(self, restarts_max: int) -> None:
        self._restarts_max = restarts_max
        self._breaks = 0
        self._counts: dict[int, int] = {}
        self._pardoned = False

    @property
    def breaks(self) -> int:
        """In a row, without a token in between."""
        return self._breaks

    def progress(self, seqs: Iterable[int]) -> None:
        """These sequences got tokens (or their end)."""
        self._breaks = 0
        self._pardoned = False
        if self._counts:
            for seq in seqs:
                self._counts.pop(seq, None)

    def broke(self, in_flight: Iterable[int]) -> tuple[int, ...]:
        """Once more; `in_flight` stood in steps that were not answered. The suspects to give up."""
        self._breaks += 1
        counts = {seq: self._counts.get(seq, 0) + 1 for seq in in_flight}
        # Who was not there when it broke is cleared.
        suspects = tuple(seq for seq, count in counts.items() if count > self._restarts_max)
        self._counts = {seq: n for seq, n in counts.items() if seq not in suspects}
        if suspects and not self._pardoned:
            self._pardoned = True
            self._breaks = min(self._breaks, self._restarts_max)
        return suspects

    @property
    def hopeless(self) -> bool:
        """It broke more often in a row than it may be restarted."""
        return self._breaks > self._restarts_max
