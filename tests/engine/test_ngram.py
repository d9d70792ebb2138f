"""Prompt lookup: which earlier run is followed, what a tree of several is, what is remembered."""

from collections.abc import Sequence
from random import Random

import pytest

from aserve.core.message import NO_DRAFTING, Admit, Drafting, Rows, Sampling
from aserve.core.replica import RowsView, SequenceState
from aserve.core.tree import NO_DRAFT, Draft, malformed
from aserve.runner.drafter import Kept
from aserve.runner.ngram import LOOKED_AT_MAX, NgramDrafter, Text, draft_of

CHAIN = Drafting(4, 1, 4)


def text_of(tokens: Sequence[int], match_min: int = 2, match_max: int = 4) -> Text:
    text = Text(match_min, match_max)
    text.extend(tokens)
    return text


def chain(*tokens: int) -> Draft:
    return Draft(tokens, tuple(range(-1, len(tokens) - 1)))


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert draft_of(text_of([1, 2, 3, 4, 5, 6, 1, 2]), CHAIN) == chain(3, 4, 5, 6)


def test_a_text_without_repeats_has_no_draft() -> None:
    for tokens in ([], [1], [1, 2, 3, 4], [1, 2, 9, 2]):
        assert draft_of(text_of(tokens), CHAIN) == NO_DRAFT


def test_the_latest_of_equal_matches_wins() -> None:
    assert draft_of(text_of([1, 2, 3, 1, 2, 4, 7, 1, 2]), CHAIN).tokens[0] == 4


def test_a_longer_match_wins_over_a_later_one() -> None:
    tokens = [8, 1, 2, 3, 9, 1, 2, 4, 8, 1, 2]
    assert draft_of(text_of(tokens), CHAIN).tokens[0] == 3
    assert draft_of(text_of(tokens, match_max=2), CHAIN).tokens[0] == 4


def test_a_copy_runs_on_into_what_it_copies() -> None:
    assert draft_of(text_of([5, 1, 2, 1, 2]), CHAIN) == chain(1, 2, 1, 2)
    assert draft_of(text_of([7, 7, 7]), Drafting(6, 1, 6)) == chain(*[7] * 6)


def test_continuations_of_several_matches_share_their_beginning() -> None:
    tokens = [1, 2, 3, 4, 6, 1, 2, 3, 5, 6, 1, 2, 8, 8, 9, 1, 2]
    assert draft_of(text_of(tokens), Drafting(3, 2, 8)) == Draft(
        (8, 8, 9, 3, 5, 6, 4, 6), (-1, 0, 1, -1, 3, 4, 3, 6)
    )
    assert draft_of(text_of(tokens), Drafting(3, 1, 8)) == chain(8, 8, 9)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_trees_within_their_bounds(seed: int) -> None:
    random = Random(seed)
    text = text_of([random.randrange(4) for _ in range(120)], random.randint(1, 3), 4)
    drafting = Drafting(random.randint(1, 6), random.randint(1, 3), random.randint(1, 12))
    draft = draft_of(text, drafting)
    assert malformed(draft, drafting) is None
    levels: list[int] = []
    for parent in draft.parents:
        levels.append(1 if parent < 0 else levels[parent] + 1)
    assert max(levels, default=0) <= drafting.depth
    children = list(zip(draft.parents, draft.tokens, strict=True))
    assert len(set(children)) == len(children), "siblings differ"
    assert all(draft.parents.count(node) <= drafting.topk for node in range(-1, len(levels)))


@pytest.mark.parametrize("seed", range(10))
def test_the_match_is_the_one_that_a_search_of_the_whole_text_finds(seed: int) -> None:
    random = Random(seed)
    tokens = [random.randrange(5) for _ in range(60)]
    for end in range(1, len(tokens)):
        known = tokens[:end]
        found = text_of(known).matches()
        lengths = {
            at: next(n for n in range(min(4, at), -1, -1) if known[at - n : at] == known[end - n :])
            for at in range(1, end)
        }
        expected = sorted((at for at in lengths if lengths[at] >= 2), reverse=True)
        assert found == sorted(expected, key=lambda at: -lengths[at])


def test_a_search_ends_however_often_a_run_came_before() -> None:
    assert len(text_of([1, 2, 3] * 500).matches()) == LOOKED_AT_MAX


def test_a_drafter_follows_chunks_draws_and_accepted_paths() -> None:
    prompt = (1, 2, 3, 4, 5, 1, 2)
    state = SequenceState(Admit(1, prompt, 7, 0, (), Sampling()))
    drafter = NgramDrafter(2, 4)

    def kept(start: int, tokens: tuple[int, ...], drawn: tuple[int, ...], sample: bool) -> Kept:
        view = RowsView(state, Rows(1, start, tokens, (), sample, ()), 0, 4)
        return Kept(view, 0, tuple(range(len(tokens))), drawn, sample)

    middle = kept(0, prompt[:4], prompt[1:5], False)
    assert drafter.draft([middle], {}, CHAIN) == [NO_DRAFT], "nothing was drawn"
    last = kept(4, prompt[4:], (1, 2, 3), True)
    assert drafter.draft([last], {}, CHAIN) == [chain(4, 5, 1, 2)]
    # The report of that draw is not there yet, nor of the next: the state knows neither.
    tree = RowsView(state, Rows(1, 7, (3, 4, 5), (-1, 0, 1), True, ()), 0, 4)
    path = Kept(tree, 0, (0, 1), (4, 9), True)
    assert drafter.draft([path], {}, CHAIN) == [NO_DRAFT]
    again = kept(9, (9,), (1,), True)
    assert drafter.draft([again], {}, NO_DRAFTING) == [NO_DRAFT]
    assert drafter.draft([kept(10, (1,), (2,), True)], {}, CHAIN) == [chain(3, 4, 9, 1)]


def test_a_sequence_that_comes_back_is_read_anew() -> None:
    state = SequenceState(Admit(1, (1, 2, 3, 1), 4, 0, (), Sampling()))
    drafter = NgramDrafter(2, 4)
    view = RowsView(state, Rows(1, 0, (1, 2, 3, 1), (), True, ()), 0, 4)
    for _ in range(2):
        kept = Kept(view, 0, (0, 1, 2, 3), (2, 3, 1, 2), True)
        assert drafter.draft([kept], {}, CHAIN) == [chain(3, 1, 2, 3)]
        drafter.drop(1)
    # A prefix that the cache held has no rows.
    view = RowsView(state, Rows(1, 3, (1,), (), True, ()), 0, 4)
    kept = Kept(view, 0, (0,), (2,), True)
    assert drafter.draft([kept], {}, CHAIN) == [chain(3, 1, 2, 3)]
