"""The legible model itself: what the oracle says is what the tokens say, however they come."""

from random import Random

import numpy as np
import pytest

from aserve.core.message import Drafting, Grammar, Sampling
from aserve.core.noise import mix64
from aserve.core.request import Request
from aserve.core.tree import Draft, depths, malformed
from aserve.testing import arithmetic as model
from aserve.testing.arithmetic import RULE_KIND, Shape
from aserve.testing.drafts import draft
from aserve.testing.oracle import Reading, say

SHAPE = Shape(layers=3)


def request_of(tokens: tuple[int, ...] = (1, 2, 3), **sampling: object) -> Request:
    return Request(0, tokens, 12, Sampling(**{"seed": 5, **sampling}))


def test_mixing_an_array_is_mixing_each_number() -> None:
    numbers = [0, 1, 12345, (1 << 64) - 1]
    assert model.mix(np.array(numbers, dtype=np.uint64)).tolist() == [mix64(n) for n in numbers]


@pytest.mark.parametrize("experts", [False, True])
def test_reading_in_pieces_is_reading_at_once(experts: bool) -> None:
    shape = Shape(layers=2, experts=experts)
    tokens = tuple(Random(1).randrange(32) for _ in range(20))
    whole = Reading(shape).push(tokens)
    pieces = Reading(shape)
    parts = [pieces.push(tokens[start:end]) for start, end in ((0, 7), (7, 8), (8, 20))]
    assert np.concatenate(parts).tolist() == whole.tolist()


def test_parts_of_a_layer_sum_to_the_layer_and_stay_exact_in_float64() -> None:
    hidden = model.small(np.arange(50, dtype=np.uint64))
    whole = model.units(0, hidden, slice(0, model.UNITS))
    parts = [model.units(0, hidden, slice(start, start + 4)) for start in range(0, model.UNITS, 4)]
    assert sum(part.astype(np.float64) for part in parts).tolist() == whole.tolist()
    assert int(whole.max()) < 1 << 50


@pytest.mark.parametrize("change", ["order", "token", "layer skipped", "layers swapped"])
def test_whatever_changes_what_is_read_changes_what_is_said(change: str) -> None:
    said = say(request_of(tuple(range(10))), SHAPE).tokens
    tokens = {"order": (1, 0, *range(2, 10)), "token": (0, 1, 2, 4, *range(4, 10))}
    if change in tokens:
        assert say(request_of(tokens[change]), SHAPE).tokens != said
    elif change == "layer skipped":
        assert say(request_of(tuple(range(10))), Shape(layers=2)).tokens != said
    else:
        salts = model.KEY_SALTS
        assert model.cached(0, salts[0], slice(0, 1)).tolist() != (
            model.cached(1, salts[0], slice(0, 1)).tolist()
        )


def test_a_rule_is_kept_and_may_break() -> None:
    kept = say(request_of(grammar=Grammar(RULE_KIND, "7")), SHAPE)
    made: list[int] = []
    for token in kept.tokens:
        assert model.allowed(request_of(grammar=Grammar(RULE_KIND, "7")).sampling, made, 32)[token]
        made.append(token)
    reasons = [
        say(request_of(grammar=Grammar(RULE_KIND, f"{key}!")), SHAPE).reason for key in range(40)
    ]
    assert "error" in reasons
    assert "length" in reasons


def test_what_is_said_beyond_the_end_goes_on_from_it() -> None:
    said = say(request_of(), SHAPE, n_beyond=4)
    longer = say(Request(0, (1, 2, 3), 16, Sampling(seed=5)), SHAPE)
    assert said.tokens + said.beyond == longer.tokens


def test_drafts_are_right_and_wrong_and_seldom_in_order() -> None:
    random = Random(0)
    right = (3, 1, 4, 1, 5)
    n_right = n_wrong = n_winding = 0
    for _ in range(300):
        tokens, parents = draft(random, right, Drafting(6, 6, 6), 32)
        assert len(tokens) == len(parents) <= 6
        path: list[int] = []
        for node, parent in enumerate(parents):
            assert -1 <= parent < node
            siblings = [tokens[n] for n, p in enumerate(parents) if p == parent]
            assert len(siblings) == len(set(siblings))
            is_next = parent == (path[-1] if path else -1) and len(path) < len(right)
            if is_next and tokens[node] == right[len(path)]:
                path.append(node)
        n_right += len(path)
        n_wrong += len(tokens) - len(path)
        n_winding += path != list(range(len(path)))
    assert min(n_right, n_wrong) > 200
    assert n_winding > 100


def test_drafts_keep_within_what_is_asked() -> None:
    random = Random(0)
    asked = Drafting(depth=2, topk=2, tokens=5)
    deepest = widest = 0
    for _ in range(200):
        tokens, parents = draft(random, (3, 1, 4), asked, 32)
        assert malformed(Draft(tokens, parents), asked) is None
        deepest = max([deepest, *(1 + depth for depth in depths(parents))])
        widest = max([widest, *(parents.count(parent) for parent in parents)])
    assert (deepest, widest) == (2, 2)
