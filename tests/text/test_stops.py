"""Stop strings against a search over the whole text, under any chunking."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from aserve.text.stops import StopStrings

texts = st.text(alphabet="abc", max_size=40)
stop_lists = st.lists(st.text(alphabet="abc", max_size=5), max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The shortest beginning of `text` that ends in a stop string."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if stop and text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, borders: list[int]) -> list[str]:
    at = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


@given(texts, stop_lists, st.lists(st.integers(0, 40), max_size=8), st.booleans())
@example("aab", ["ab"], [1, 2], False)
@example("abcabcabd", ["abcabd"], [4, 7], True)
@example("abc", ["bc", "abc"], [], False)
@example("abc", ["abc", "b"], [], False)
def test_streaming_cuts_where_a_search_of_the_whole_text_does(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    stream = StopStrings(stops, include)
    shown, hit = "", None
    for chunk in cut(text, borders):
        safe, hit = stream.push(chunk)
        shown += safe
    shown += stream.flush()
    assert (shown, hit) == naive(text, stops, include)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    stream = StopStrings(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        safe, hit = stream.push(text[end - 1])
        shown += safe
        if hit:
            break
        held = text[len(shown) : end]
        starts = {stop[:n] for stop in stops for n in range(len(stop))}
        assert len(held) == max(n for n in range(end + 1) if text[end - n : end] in starts | {""})


def test_after_a_hit_nothing_more_comes() -> None:
    stream = StopStrings(["."])
    assert stream.push("One. Two") == ("One", ".")
    assert stream.push(" three.") == ("", ".")
    assert stream.flush() == ""


def test_the_first_listed_wins_where_two_end_together() -> None:
    assert StopStrings(["cd", "bcd"]).push("abcde") == ("ab", "cd")
    assert StopStrings(["bcd", "cd"]).push("abcde") == ("a", "bcd")


def test_a_long_text_costs_its_length() -> None:
    """A search that starts anew for each held character would take minutes here."""
    stream = StopStrings(["a" * 256 + "b", "a" * 255 + "c"])
    shown = "".join(stream.push("a")[0] for _ in range(20_000))
    assert len(shown) == 20_000 - 256
