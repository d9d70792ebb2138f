"""Tokenizers of model folders: ids, text, bytes, special tokens, and what is read beside them."""

import json
import pathlib
import shutil
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import ModelError, RequestError
from aserve.testing.tiny import CHAT_TEMPLATE, tiny_tokenizer
from aserve.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = (
    *("", " ", "Hello, world!", "  two  spaces ", "\n\n2.", "naïve café", "你好世界", "🙂👍🏽"),
    *("<|im_start|>user\nhi<|im_end|>\n", "a<think>b</think>", "\x00\x01\x7f", "e\u0301 \u00e9"),
)
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
TINY = Tokenizer(tiny_tokenizer())


@pytest.fixture
def folder(tiny_model_path: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the tiny model's folder that a test may change."""
    return pathlib.Path(shutil.copytree(tiny_model_path, tmp_path / "model"))


def edit(path: pathlib.Path, **changes: Any) -> None:
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def test_ids_and_text_are_those_of_transformers(tiny_model_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(tiny_model_path)
    oracle = transformers.AutoTokenizer.from_pretrained(tiny_model_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text)
        assert tokenizer.decode(ids) == oracle.decode(ids) == text
        assert tokenizer.decode(ids, skip_special=True) == oracle.decode(
            ids, skip_special_tokens=True
        )
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.chat_template == oracle.chat_template == CHAT_TEMPLATE
    assert tokenizer.bos_id == oracle.bos_token_id
    assert tokenizer.eos_ids == (oracle.eos_token_id,)


@given(any_text)
def test_text_goes_there_and_back(text: str) -> None:
    ids = TINY.encode(text, parse_special=False)
    assert TINY.decode(ids) == text
    assert b"".join(map(TINY.token_bytes, ids)) == text.encode()


@given(any_text, st.sampled_from(["<|im_start|>", "<|im_end|>"]), any_text)
def test_special_tokens_are_parsed_only_when_asked(before: str, name: str, after: str) -> None:
    text = before + name + after
    number = TINY.hf.token_to_id(name)
    assert number in TINY.encode(text)
    ids = TINY.encode(text, parse_special=False)
    assert not any(map(TINY.is_special, ids))
    assert TINY.decode(ids) == text


def test_special_tokens_have_a_name_and_no_bytes() -> None:
    number = TINY.hf.token_to_id("<|im_end|>")
    assert TINY.is_special(number)
    assert TINY.special_text(number) == "<|im_end|>"
    assert TINY.token_bytes(number) == b""
    assert TINY.decode([number], skip_special=True) == ""


def test_added_tokens_that_are_not_special_have_both() -> None:
    number = TINY.hf.token_to_id("<think>")
    assert not TINY.is_special(number)
    assert TINY.special_text(number) == ""
    assert TINY.token_bytes(number) == b"<think>"
    assert TINY.encode("<think>", parse_special=False) == [number]


@pytest.mark.parametrize("number", [-1, 384, 1 << 40])
def test_an_id_outside_the_vocabulary_has_no_bytes(number: int) -> None:
    assert TINY.token_bytes(number) == b""
    assert not TINY.is_special(number)
    assert TINY.special_text(number) == ""


def test_ids_that_are_no_ids_are_refused() -> None:
    assert TINY.decode([1 << 20]) == ""
    for number in (-1, 1 << 40):
        with pytest.raises(RequestError, match="is no id"):
            TINY.decode([number])


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        TINY.encode("a\ud800b")


def test_truncation_and_padding_of_the_file_are_switched_off(folder: pathlib.Path) -> None:
    hf = tiny_tokenizer()
    hf.enable_truncation(4)
    hf.enable_padding(length=64)
    hf.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_end_tokens_are_those_of_all_configs(folder: pathlib.Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 2])
    edit(folder / "config.json", eos_token_id=8)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_start|>", "special": True})
    assert load_tokenizer(folder).eos_ids == (7, 2, 8, 1)
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token="no such token")
    assert load_tokenizer(folder).eos_ids == (8,)


def test_a_chat_template_may_stand_in_four_places(folder: pathlib.Path) -> None:
    config = folder / "tokenizer_config.json"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    edit(config, chat_template=several)
    assert load_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J")
    assert load_tokenizer(folder).chat_template == "J"
    own = folder / "own.jinja"
    own.write_text("O")
    assert load_tokenizer(folder, own).chat_template == "O"
    (folder / "chat_template.jinja").unlink()
    edit(config, chat_template=...)
    assert load_tokenizer(folder).chat_template is None
    with pytest.raises(ModelError, match=r"cannot read .*missing\.jinja"):
        load_tokenizer(folder, folder / "missing.jinja")


def test_a_folder_without_a_tokenizer_says_so(folder: pathlib.Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_file_is_named(folder: pathlib.Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        load_tokenizer(folder)
