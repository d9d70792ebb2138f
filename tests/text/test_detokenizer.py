"""The detokenizer against the tokenizer's own one-shot decoding, for every kind of decoder."""

import dataclasses

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from aserve.text.detokenizer import BYTE_OF_CHAR, REPLACEMENT, Detokenizer

SPECIAL = ["<|end|>", "<\N{FULLWIDTH VERTICAL LINE}begin▁of▁text>"]
PLAIN = ["<tool_call>", "é", "a b", "<0xC3>"]


@dataclasses.dataclass(frozen=True)
class Fake:
    hf: tokenizers.Tokenizer


def build(vocab: list[str], decoder: object) -> Fake:
    hf = tokenizers.Tokenizer(models.BPE(vocab={v: i for i, v in enumerate(vocab)}, merges=[]))
    hf.decoder = decoder
    hf.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    hf.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return Fake(hf)


def byte_level() -> Fake:
    letters = sorted(BYTE_OF_CHAR)
    words = ["Ġthe", "hello", "Ã©", "ðŁĺ", "Ģ", "âĤ¬", "ĊĊ", "not➜bytes"]
    return build(letters + words, decoders.ByteLevel())


PIECES = ["▁", "▁▁", "▁the", "he", "llo", "▁▁a▁b", ".", "é", "日本", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def fallback(*tail: object) -> Fake:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail]
    return build(PIECES + BYTES, decoders.Sequence(steps))


KINDS = {
    "byte_level": byte_level(),
    "byte_level_in_sequence": build(
        sorted(BYTE_OF_CHAR), decoders.Sequence([decoders.ByteLevel()])
    ),
    "llama": fallback(decoders.Strip(" ", 1, 0)),
    "strips_two": fallback(decoders.Strip(" ", 2, 0)),
    "gemma": fallback(),
    "metaspace": build(PIECES, decoders.Metaspace()),
    "metaspace_never": build(PIECES, decoders.Metaspace(prepend_scheme="never")),
}


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[list[int]], bool]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    known = KINDS[kind].hf.get_vocab_size(with_added_tokens=True)
    ids = st.integers(-1, known + 2)
    # Runs of one alphabet, so that whole characters happen.
    text = draw(st.text(max_size=4)).encode()
    spelled = [KINDS[kind].hf.token_to_id(f"<0x{byte:02X}>") for byte in text]
    chunk = st.lists(ids, max_size=5) | st.just([token for token in spelled if token is not None])
    return kind, draw(st.lists(chunk, max_size=8)), draw(st.booleans())


@given(cases())
def test_deltas_joined_are_the_one_shot_text(case: tuple[str, list[list[int]], bool]) -> None:
    kind, chunks, skip_special = case
    detokenizer = Detokenizer(KINDS[kind], skip_special)
    pieces = [detokenizer.push(chunk) for chunk in chunks]
    ids = [token for chunk in chunks for token in chunk if token >= 0]
    one_shot = KINDS[kind].hf.decode(ids, skip_special_tokens=skip_special)
    assert "".join(pieces) + detokenizer.flush() == one_shot
    assert detokenizer.flush() == ""


@given(st.text(max_size=30), st.sampled_from(["byte_level", "llama", "gemma"]))
def test_no_character_is_ever_split(text: str, kind: str) -> None:
    tokenizer = KINDS[kind]
    if kind == "byte_level":
        letters = {byte: letter for letter, byte in BYTE_OF_CHAR.items()}
        spelled = [tokenizer.hf.token_to_id(letters[byte]) for byte in text.encode()]
    else:
        spelled = [tokenizer.hf.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([token]) for token in spelled] + [detokenizer.flush()]
    lost = kind == "llama" and text.startswith(" ")
    assert "".join(pieces) == (text[1:] if lost else text)


def test_what_is_certain_is_shown_at_once() -> None:
    tokenizer = KINDS["byte_level"]
    detokenizer = Detokenizer(tokenizer)

    def push(piece: str) -> str:
        return detokenizer.push([tokenizer.hf.token_to_id(piece)])

    assert push("hello") == "hello"
    assert push("Ġthe") == " the"
    assert push("ðŁĺ") == ""  # three bytes of four
    assert push("Ģ") == "\N{GRINNING FACE}"
    assert push("ðŁĺ") == ""
    assert push("h") == REPLACEMENT + "h"
    assert push("<tool_call>") == "<tool_call>"


def test_special_tokens_are_skipped_or_shown() -> None:
    for kind, tokenizer in KINDS.items():
        end = tokenizer.hf.token_to_id("<|end|>")
        assert Detokenizer(tokenizer).push([end]) == "", kind
        assert Detokenizer(tokenizer, skip_special=False).push([end]) == "<|end|>", kind


@pytest.mark.parametrize("kind", ["llama", "metaspace"])
def test_text_that_continues_keeps_its_leading_space(kind: str) -> None:
    tokenizer = KINDS[kind]
    word = tokenizer.hf.token_to_id("▁the")
    assert Detokenizer(tokenizer).push([word, word]) == "the the"
    assert Detokenizer(tokenizer, continues=True).push([word, word]) == " the the"


@pytest.mark.parametrize("decoder", [decoders.WordPiece(prefix="##", cleanup=False), None])
def test_other_decoders_go_through_a_window(decoder: object) -> None:
    tokenizer = build(["un", "##believ", "##able", "yes", "no"], decoder)
    ids = [0, 1, 2, 3, 4, 4, 0, 1, 3]
    for skip_special in (True, False):
        for size in (1, 2, 9):
            detokenizer = Detokenizer(tokenizer, skip_special)
            chunks = [ids[at : at + size] for at in range(0, len(ids), size)]
            text = "".join(detokenizer.push(chunk) for chunk in chunks) + detokenizer.flush()
            assert text == tokenizer.hf.decode(ids, skip_special_tokens=skip_special)


def test_a_window_stays_small() -> None:
    tokenizer = build(["a", "##b"], decoders.WordPiece(prefix="##", cleanup=False))
    detokenizer = Detokenizer(tokenizer)
    for _ in range(500):
        detokenizer.push([0, 1])
    window = detokenizer._stream._window  # type: ignore[attr-defined]
    assert len(window) < 10
