"""What the grid of ranks is, as a table, and who is to blame when it breaks again and again.

Pure: no awaits, clocks or processes. `aserve.actors.supervisor` does what it says.
"""

from collections.abc import Mapping
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

    Progress is a token: it takes the count back to nothing. A sequence that stood in an unanswered
    step at `restarts_max + 1` breaks in a row, and got no token in between, is a suspect: the ranks
    die of what it asks for, or of its neighbours in the step, which nobody can tell apart from
    here. So that one poisoned request cannot keep all others from ever being answered, suspects are
    given up and the ranks get one more chance without them. The innocent among them lose an answer
    that they were not getting.

    Steps alone are no progress: the first steps of every restart only compute again what was lost.
    """

    def __init__(self, restarts_max: int) -> None:
        self.breaks = 0  # in a row
        self._restarts_max = restarts_max
        self._n_tokens = -1  # given out in all, at the last break
        self._counts: dict[int, tuple[int, int]] = {}  # seq -> tokens it had, breaks since
        self._pardoned = False

    def broke(self, in_flight: Mapping[int, int], n_tokens: int) -> tuple[int, ...]:
        """Once more. `in_flight` are the sequences in unanswered steps and how many tokens each
        got, `n_tokens` how many were given out in all. Returns the suspects to give up."""
        if n_tokens != self._n_tokens:
            self._n_tokens, self.breaks, self._pardoned = n_tokens, 0, False
        self.breaks += 1
        counts: dict[int, tuple[int, int]] = {}
        for seq, had in in_flight.items():  # who was not there when it broke is cleared
            before, count = self._counts.get(seq, (had, 0))
            counts[seq] = (had, count + 1 if had == before else 1)
        suspects = [seq for seq, (_, count) in counts.items() if count > self._restarts_max]
        for seq in suspects:
            del counts[seq]
        self._counts = counts
        if suspects and self._restarts_max and not self._pardoned:
            self._pardoned = True
            self.breaks = min(self.breaks, self._restarts_max)
        return tuple(suspects)

    @property
    def hopeless(self) -> bool:
        """It broke more often in a row than it may be restarted."""
        return self.breaks > self._restarts_max
