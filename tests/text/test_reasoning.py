"""Thinking, split off under any chunking."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.text.reasoning import ReasoningParser, Where, starts_where, wants_reasoning

parts = st.sampled_from(["<think>", "</think>", "<", "/think", ">", "a", "\n", " ", "thi", "</"])
texts = st.lists(parts, max_size=10).map("".join)
wheres = st.sampled_from(["before", "inside", "after"])


def parse(chunks: list[str], where: Where) -> tuple[str, str]:
    parser = ReasoningParser(where)
    told = [parser.push(chunk) for chunk in chunks] + [parser.flush()]
    return "".join(r for r, _ in told), "".join(c for _, c in told)


@given(texts, st.lists(st.integers(0, 60), max_size=6), wheres)
def test_chunks_do_not_matter(text: str, borders: list[int], where: Where) -> None:
    at = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    chunks = [text[a:b] for a, b in itertools.pairwise(at)]
    assert parse(chunks, where) == parse([text], where)


@given(texts, wheres)
def test_joined_parts_are_the_text_without_the_tags(text: str, where: Where) -> None:
    reasoning, content = parse([text], where)
    rest = text
    if where == "before" and text.lstrip().startswith("<think>"):
        rest = text.replace("<think>", "", 1)
        where = "inside"
    if where == "inside":
        rest = rest.replace("</think>", "", 1)
    assert reasoning + content == rest


@pytest.mark.parametrize(
    ("text", "where", "wanted"),
    [
        ("<think>\nhm\n</think>\n\nYes", "before", ("\nhm\n", "\n\nYes")),
        ("hm</think>Yes", "inside", ("hm", "Yes")),
        ("hm", "inside", ("hm", "")),
        ("Yes, <think> is a tag", "before", ("", "Yes, <think> is a tag")),
        ("  ", "before", ("", "  ")),
        ("<think>a</think>b<think>c</think>", "before", ("a", "b<think>c</think>")),
        ("<think>a</think>", "after", ("", "<think>a</think>")),
        ("cut off </thi", "inside", ("cut off </thi", "")),
    ],
)
def test_cases(text: str, where: Where, wanted: tuple[str, str]) -> None:
    assert parse([text], where) == wanted
    assert parse(list(text), where) == wanted


def test_reasoning_is_told_as_it_comes() -> None:
    parser = ReasoningParser()
    assert parser.push("<think>one ") == ("one ", "")
    assert parser.push("two <") == ("two ", "")
    assert parser.push("/thin") == ("", "")
    assert parser.push("g </think>ok") == ("</thing ", "ok")


def test_where_the_model_starts_is_read_off_the_prompt() -> None:
    assert starts_where("<|im_start|>assistant\n") == "before"
    assert starts_where("<|im_start|>assistant\n<think>\n") == "inside"
    assert starts_where("<|im_start|>assistant\n<think>\n\n</think>\n\n") == "after"


def test_a_template_says_whether_its_model_thinks() -> None:
    assert wants_reasoning("{{ x.split('</think>')[0] }}")
    assert not wants_reasoning("{{ x }}")
    assert not wants_reasoning(None)
