"""The state table of the grid and who is to blame, without a rank in sight."""

import pytest

from aserve.actors.supervision import TRANSITIONS, Blame, Event, State, step


def test_a_first_start_that_fails_is_not_tried_again_and_failing_is_for_good() -> None:
    with pytest.raises(AssertionError):
        step(State.STARTING, Event.BROKE)
    assert step(State.STARTING, Event.GAVE_UP) is State.FAILED
    assert list(TRANSITIONS[State.FAILED]) == [Event.CLOSE]


def test_ranks_that_break_again_and_again_serve_again_or_are_given_up() -> None:
    state = step(step(State.STARTING, Event.STARTED), Event.BROKE)
    state = step(step(state, Event.BROKE), Event.BROKE)
    assert step(state, Event.STARTED) is State.SERVING
    assert step(state, Event.GAVE_UP) is State.FAILED


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", Event)
def test_what_is_not_listed_is_illegal(state: State, event: Event) -> None:
    if event in TRANSITIONS[state]:
        assert step(state, event) is TRANSITIONS[state][event]
    else:
        with pytest.raises(AssertionError, match=str(event)):
            step(state, event)


def test_every_state_can_be_closed_and_reached() -> None:
    reached = {State.STARTING}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS[state].values()}
    assert reached == set(State)
    assert all(Event.CLOSE in TRANSITIONS[state] for state in State if state is not State.CLOSED)


def test_breaks_with_nothing_in_flight_are_forgiven_so_many_times() -> None:
    blame = Blame(3)
    for expected in (False, False, False, True):
        assert blame.broke({}, 5) == ()
        assert blame.hopeless is expected


def test_a_token_wipes_the_slate() -> None:
    blame = Blame(2)
    for n_tokens in range(20):
        assert blame.broke({1: n_tokens}, n_tokens) == ()
        assert blame.breaks == 1
        assert not blame.hopeless


def test_who_stands_in_every_step_that_broke_is_given_up_and_the_others_get_a_chance() -> None:
    blame = Blame(2)
    assert blame.broke({7: 0, 8: 3}, 10) == ()
    assert blame.broke({7: 0, 9: 1}, 10) == ()
    assert not blame.hopeless
    assert blame.broke({7: 0, 8: 3}, 10) == (7,)
    assert not blame.hopeless, "one more start without the suspect"
    assert blame.broke({8: 3}, 10) == ()
    assert blame.hopeless, "it was not the suspect"


def test_others_progress_does_not_hide_a_poisoned_sequence() -> None:
    """8 gets a token between any two breaks; 7 never does, and is found out all the same."""
    blame = Blame(3)
    for n in range(3):
        assert blame.broke({7: 0, 8: n}, n) == ()
        assert not blame.hopeless
    assert blame.broke({7: 0, 8: 3}, 3) == (7,)
    assert not blame.hopeless


def test_a_sequence_that_was_elsewhere_once_is_cleared() -> None:
    blame = Blame(1)
    assert blame.broke({7: 0}, 0) == ()
    assert blame.broke({}, 0) == ()
    assert blame.hopeless
    blame = Blame(2)
    for n in range(3):
        assert blame.broke({7: 0} if n % 2 == 0 else {8: 0}, n) == ()


def test_no_restarts_means_none() -> None:
    blame = Blame(0)
    blame.broke({1: 0}, 0)
    assert blame.hopeless
