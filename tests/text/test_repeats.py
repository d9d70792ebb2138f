"""Counts that multiply are found wherever they stand, and never looked for in vain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.text.repeats import COUNT_MAX, repeats


@pytest.mark.parametrize(
    ("regex", "count"),
    [
        ("", 1),
        ("abc*d+", 1),
        ("a{7}", 7),
        ("a{3,7}", 7),
        ("a{7,}", 7),
        ("a{0}", 1),
        ("a{2}b{3}|c{4}", 4),
        ("(a{20}b){30}c{9}", 600),
        ("((a{1,5}){1,5}){1,5}", 125),
        ("(?:a{2}){3}?{4}", 24),
        ("(a{9})+{2}", 18),
        (r"(\{9\}[{8}(]{2}){3}", 6),
        (r"([]{8}]{2}[^]{8}]\]{3}){3}", 9),
        (r"(\p{L}{4}\x{41}\x41{2}){3}", 12),
        ("(a{5}|b)c{2}", 5),
        ("(a{1000}", 1000),
        ("a{4}))){5}", 5),
        ("a{" + "9" * 6000 + "}", COUNT_MAX),
        ("(" * 3000 + "a" + "){9}" * 3000, COUNT_MAX),
    ],
)
def test_nested_counts_multiply(regex: str, count: int) -> None:
    assert repeats(regex) == count


@given(st.text("a(){}[]\\?*,|:19^p", max_size=60))
def test_any_text_has_a_number(text: str) -> None:
    assert 1 <= repeats(text) <= COUNT_MAX


def test_a_long_text_is_read_once() -> None:
    for text in ("[" * 65_536, "\\p{" * 20_000, "(" * 65_536, "{1," * 20_000, "[^" * 30_000):
        assert repeats(text) == 1
