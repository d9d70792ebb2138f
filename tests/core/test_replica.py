"""A rank's bookkeeping: what its views say, and what it refuses to apply."""

import msgspec
import pytest

from aserve.core.message import Admit, Batch, Commit, Rows, Sampling, StepPlan
from aserve.core.replica import Replica

SIZE = 4


def plan(step: int, *rows: Rows, **parts: object) -> StepPlan:
    empty = StepPlan(step, 0, (), (), (), (), (Batch(rows),), ())
    return msgspec.structs.replace(empty, **parts)


def admit(**changes: object) -> Admit:
    made = Admit(1, (10, 11, 12, 13, 14, 15), 6, 4, (7,), Sampling())
    return msgspec.structs.replace(made, **changes)


FIRST = Rows(1, 4, (14, 15), (), True, (2,))


def test_views_tell_slots_positions_and_state() -> None:
    replica = Replica(SIZE)
    (view,) = replica.apply(plan(0, FIRST, admits=(admit(),))).views
    assert (view.start, view.n_rows, view.kv_len, view.group) == (4, 2, 6, 0)
    assert view.slots() == [8, 9]
    assert view.positions() == [4, 5]
    assert view.state.pages == [7, 2]
    assert (view.state.prompt_len, view.state.n_generated) == (6, 0)
    commit = Commit(1, (0, 1), (16,), False)
    (view,) = replica.apply(plan(1, Rows(1, 6, (16,), (), True, ()), commits=(commit,))).views
    assert view.slots() == [10]
    assert view.positions() == [6]
    assert view.state.tokens == [10, 11, 12, 13, 14, 15, 16]
    assert view.state.n_generated == 1


def test_a_tree_of_rows_takes_slots_in_order_and_positions_by_depth() -> None:
    replica = Replica(SIZE)
    replica.apply(plan(0, FIRST, admits=(admit(),)))
    rows = Rows(1, 6, (16, 20, 21, 22), (-1, 0, 0, 2), True, (9,))
    (view,) = replica.apply(plan(1, rows, commits=(Commit(1, (0, 1), (16,), False),))).views
    assert view.slots() == [10, 11, 36, 37]
    assert view.positions() == [6, 7, 7, 8]


def test_a_drop_forgets_a_sequence() -> None:
    replica = Replica(SIZE)
    replica.apply(plan(0, FIRST, admits=(admit(),)))
    replica.apply(plan(1, drops=(1,)))
    assert replica.sequences == {}
    replica.apply(plan(2, FIRST, admits=(admit(),)))  # and it may come again


@pytest.mark.parametrize(
    "wrong",
    [
        plan(1),
        plan(0, FIRST),
        plan(0, drops=(1,)),
        plan(0, admits=(admit(), admit())),
        plan(0, admits=(admit(kv_len=3),)),
        plan(0, admits=(admit(kv_len=8, pages=(7, 8)),)),
        plan(0, admits=(admit(prompt_len=0),)),
        plan(0, admits=(admit(prompt_len=7),)),
        plan(0, msgspec.structs.replace(FIRST, start=5), admits=(admit(),)),
        plan(0, msgspec.structs.replace(FIRST, pages=()), admits=(admit(),)),
        plan(0, msgspec.structs.replace(FIRST, tokens=(14, 16)), admits=(admit(),)),
        plan(0, msgspec.structs.replace(FIRST, tokens=(16,)), admits=(admit(),)),
        plan(0, msgspec.structs.replace(FIRST, sample=False), admits=(admit(),)),
        plan(0, FIRST, admits=(admit(),), commits=(Commit(1, (0,), (), False),)),
    ],
)
def test_a_plan_against_the_state_is_refused(wrong: StepPlan) -> None:
    with pytest.raises((AssertionError, KeyError)):
        Replica(SIZE).apply(wrong)


def test_a_commit_beyond_the_pages_or_the_tokens_is_refused() -> None:
    for path in ((0, 1, 2, 3, 4), (0, 1, 2)):
        replica = Replica(SIZE)
        replica.apply(plan(0, FIRST, admits=(admit(),)))
        with pytest.raises(AssertionError):
            replica.apply(plan(1, commits=(Commit(1, path, (), False),)))


@pytest.mark.parametrize(
    "other",
    [
        plan(0, FIRST, admits=(admit(),), microbatch=1),
        plan(0, FIRST, admits=(admit(pages=(6,)),)),
        plan(0, FIRST, admits=(admit(tokens=(9, 11, 12, 13, 14, 15)),)),
        plan(0, FIRST, admits=(admit(prompt_len=5),)),
        plan(0, msgspec.structs.replace(FIRST, pages=(3,)), admits=(admit(),)),
        plan(0, admits=(admit(),)),
        plan(0, FIRST, admits=(admit(sampling=Sampling(seed=1)),)),
        plan(0, FIRST, admits=(admit(sampling=Sampling(temperature=0.5)),)),
        plan(0, msgspec.structs.replace(FIRST, pages=(3, 2)), admits=(admit(),)),
    ],
)
def test_the_digest_differs_when_the_state_does(other: StepPlan) -> None:
    one, two = Replica(SIZE), Replica(SIZE)
    one.apply(plan(0, FIRST, admits=(admit(),)))
    two.apply(other)
    assert one.digest != two.digest


def test_the_digest_tells_which_pages_of_several_came_and_in_which_order() -> None:
    digests = []
    for pages in ((2, 3, 4), (3, 2, 4)):
        replica = Replica(SIZE)
        rows = msgspec.structs.replace(FIRST, pages=pages)
        replica.apply(plan(0, rows, admits=(admit(),)))
        digests.append(replica.digest)
    assert digests[0] != digests[1]


def test_the_digest_takes_an_int_for_the_float_it_becomes_on_its_way() -> None:
    digests = []
    for temperature in (1, 1.0):
        replica = Replica(SIZE)
        admits = (admit(sampling=Sampling(temperature=temperature)),)
        replica.apply(plan(0, FIRST, admits=admits))
        digests.append(replica.digest)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("path", "tokens"), [((0, 3), (21, 30)), ((0, 2), (22, 30)), ((0, 2), (21, 31))]
)
def test_the_digest_tells_what_was_accepted_of_a_tree_and_whence_it_moves(
    path: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    digests = []
    for commit in (Commit(1, (0, 2), (21, 30), False), Commit(1, path, tokens, False)):
        replica = Replica(SIZE)
        replica.apply(plan(0, FIRST, admits=(admit(),)))
        rows = Rows(1, 6, (16, 20, 21, 22), (-1, 0, 0, 0), True, (9,))
        replica.apply(plan(1, rows, commits=(Commit(1, (0, 1), (16,), False),)))
        replica.apply(plan(2, commits=(commit,)))
        digests.append(replica.digest)
    assert digests[0] != digests[1]


def test_the_digest_remembers_the_whole_log() -> None:
    digests = []
    for pages in ((7,), (6,)):
        replica = Replica(SIZE)
        replica.apply(plan(0, FIRST, admits=(admit(pages=pages),)))
        replica.apply(plan(1, drops=(1,)))
        digests.append(replica.digest)
    assert digests[0] != digests[1]
