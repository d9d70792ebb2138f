"""Text processing on the default model's own tokenizer, template and vocabulary."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.config import Limits
from aserve.core.request import StructuredOutput
from aserve.text import chat, grammar
from aserve.text.detokenizer import Detokenizer
from aserve.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: pathlib.Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


def test_prompts_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for system in ([], [{"role": "system", "content": "Be brief."}]):
        talk = [
            *system,
            {"role": "user", "content": "What is <b>1 & 1</b>?"},
            {"role": "assistant", "content": "Zwei \N{GRINNING FACE}"},
            {"role": "user", "content": ""},
        ]
        [theirs], _ = render_jinja_template(
            [talk], chat_template=tokenizer.chat_template, add_generation_prompt=True
        )
        assert chat.render(tokenizer.chat_template, talk) == theirs
        assert ("named SmolLM" in theirs) == (not system)


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip_special=st.booleans())
def test_random_ids_stream_as_they_decode(
    tokenizer: Tokenizer, ids: list[int], skip_special: bool
) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special)
    text = "".join(detokenizer.push((token,)) for token in ids) + detokenizer.flush()
    assert text == tokenizer.decode(ids, skip_special)


@settings(max_examples=200)
@given(text=st.text(max_size=40))
def test_any_text_streams_as_it_decodes(tokenizer: Tokenizer, text: str) -> None:
    """Not always back to itself: this vocabulary lacks some bytes."""
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    ids = tokenizer.encode(text)
    streamed = "".join(detokenizer.push((token,)) for token in ids) + detokenizer.flush()
    assert streamed == tokenizer.decode(ids)


def test_json_is_let_through_and_nothing_else(tokenizer: Tokenizer) -> None:
    checked = grammar.check(StructuredOutput(json_object=True), Limits())
    good = json.dumps({"name": 'Zoë "Z"', "list": [1, 2.5e3, {"a": None}]}, ensure_ascii=False)
    matcher = grammar.compile(checked, tokenizer, tokenizer.vocab_size)
    for token in tokenizer.encode(good):
        mask = matcher.mask()
        assert mask is not None
        assert mask[token // 32] >> (token % 32) & 1
        assert matcher.accept(token)
    assert matcher.is_stopped
    for bad in ("[1]", "Sure! {}", '{"a": tru}'):
        matcher = grammar.compile(checked, tokenizer, tokenizer.vocab_size)
        assert not matcher.accept_all(tokenizer.encode(bad))
