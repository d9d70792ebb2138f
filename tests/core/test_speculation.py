"""What a configuration lets a planner ask for."""

import pytest

from aserve.core.config import Spec
from aserve.core.message import Drafting
from aserve.core.speculation import OWN, Speculation, bounded, speculation_of


def test_without_a_method_nothing_is_drafted() -> None:
    assert speculation_of(Spec(depth=3, tokens=9)) == Speculation()


@pytest.mark.parametrize("method", [name for name in OWN if name != "none"])
def test_a_methods_own_size_is_as_tight_as_can_be(method: str) -> None:
    made = speculation_of(Spec(method))
    assert made.most == OWN[method]
    assert made.adaptive


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        ({"topk": 1, "depth": 3}, Drafting(3, 1, 3)),
        ({"topk": 1, "tokens": 5}, Drafting(5, 1, 5)),
        ({"topk": 1, "depth": 3, "tokens": 9}, Drafting(3, 1, 3)),
        ({"topk": 1, "depth": 9, "tokens": 3}, Drafting(3, 1, 3)),
        ({"tokens": 2}, Drafting(2, 2, 2)),
        ({"depth": 1, "topk": 8, "tokens": 60}, Drafting(1, 8, 8)),
        ({"depth": 2, "topk": 3, "tokens": 60}, Drafting(2, 3, 12)),
        ({"depth": 8, "topk": 8, "tokens": 31}, Drafting(8, 8, 31)),
    ],
)
def test_the_configuration_goes_before_the_method(asked: dict[str, int], most: Drafting) -> None:
    assert speculation_of(Spec("eagle3", **asked)).most == most


def test_who_keeps_kv_of_pairs_has_pairs_for_keys() -> None:
    pairs = [method for method in OWN if speculation_of(Spec(method)).bigrams]
    assert pairs == ["eagle", "eagle3"]
    assert not speculation_of(Spec("draft", adaptive=False)).adaptive


def test_bounding_twice_is_bounding_once() -> None:
    for depth in range(1, 5):
        for topk in range(1, 5):
            for tokens in range(1, 40):
                once = bounded(Drafting(depth, topk, tokens))
                assert bounded(once) == once
                assert 1 <= once.depth <= once.tokens <= tokens
