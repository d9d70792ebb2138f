"""Tokenizers rebuilt from GGUF metadata, against the tokenizers they were taken from."""

import inspect
import itertools
import json
import pathlib
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2 import tokenization_qwen2

from aserve.errors import ModelError
from aserve.testing.tiny import CORPUS
from aserve.text.gguf_file import GgufFile
from aserve.text.gguf_tokenizer import PATTERNS, SPACE, rebuild
from aserve.text.tokenizer import Tokenizer, load_tokenizer

SPECIAL = ("<s>", "</s>")
MORE = ("I'LL we'Re 1234567 12\n\n3", "  if x:\n    return 42", "½ ²³ ٣٤ 你好 naïve É e\u0301")
TEXTS = (
    *CORPUS,
    *MORE,
    "",
    " ",
    "\n\n2.",
    "a\r\n\r\n b",
    "\t\t1",
    "<s>x</s>",
    "...!!! ??",
    "🙂👍🏽",
)
any_text = st.text(
    st.one_of(
        st.sampled_from("aAbzZ'sStTlL019 \n\r\t.,!-_/½٣é"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)
# Of TikToken files without a pattern of their own, which is what Llama 3 came as.
LLAMA3 = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default


def trained(splitter: pre_tokenizers.PreTokenizer, nfc: bool = False) -> tokenizers.Tokenizer:
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = splitter
    hf.decoder = decoders.ByteLevel()
    if nfc:
        hf.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    hf.train_from_iterator((*CORPUS, *MORE), trainer)
    return hf


def by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_file(hf: tokenizers.Tokenizer, pre: str | None, **more: Any) -> GgufFile:
    model = json.loads(hf.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return metadata_file(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[3 if token in SPECIAL else 1 for token in tokens],
        merges=[" ".join(merge) for merge in model["merges"]],
        **more,
    )


def metadata_file(**fields: Any) -> GgufFile:
    keys = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return GgufFile("tiny.gguf", keys, {}, None)  # type: ignore[arg-type]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ORIGINALS = {
    "gpt-2": trained(GPT2),
    "smollm": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
    ),
    "llama-bpe": trained(by_pattern(LLAMA3)),
    "qwen2": trained(by_pattern(tokenization_qwen2.PRETOKENIZE_REGEX), nfc=True),
}
REBUILT = {pre: rebuild(byte_level_file(hf, pre)) for pre, hf in ORIGINALS.items()}


@pytest.mark.parametrize("pre", ORIGINALS)
def test_ids_are_those_of_the_original_on_tricky_texts(pre: str) -> None:
    for text in TEXTS:
        ids = ORIGINALS[pre].encode(text).ids
        assert REBUILT[pre].encode(text, add_special_tokens=False).ids == ids, text
        assert REBUILT[pre].decode(ids) == ORIGINALS[pre].decode(ids)


@pytest.mark.parametrize("pre", ORIGINALS)
@given(text=any_text)
def test_ids_are_those_of_the_original_on_any_text(pre: str, text: str) -> None:
    ids = REBUILT[pre].encode(text, add_special_tokens=False).ids
    assert ids == ORIGINALS[pre].encode(text).ids


@given(text=any_text)
def test_every_pattern_keeps_every_byte(text: str) -> None:
    for pre, hf in ALL.items():
        if hf.normalizer is None:
            assert "".join(hf.decode(hf.encode(text, add_special_tokens=False).ids)) == text, pre


ALL = {pre: rebuild(byte_level_file(ORIGINALS["gpt-2"], pre)) for pre in PATTERNS}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "\n\n2.", ["ĊĊ", "2", "."]),
        ("gpt-2", "\n\n2.", ["Ċ", "Ċ", "2", "."]),
        ("llama-bpe", "12345", ["123", "45"]),
        ("qwen2", "12345", ["1", "2", "3", "4", "5"]),
        ("tekken", "fooBar/\n", ["foo", "Bar", "/Ċ"]),
        ("gpt-4o", "It's1234", ["It's", "123", "4"]),
        ("default", "a+1234", ["a", "+", "123", "4"]),
        ("default", "x$y", ["x", "$", "y"]),
    ],
)
def test_text_is_split_as_the_name_says(pre: str, text: str, pieces: list[str]) -> None:
    assert [piece for piece, _ in ALL[pre].pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_a_file_without_a_name_takes_the_default() -> None:
    hf = rebuild(byte_level_file(ORIGINALS["gpt-2"], None))
    assert hf.pre_tokenizer.__getstate__() == ALL["default"].pre_tokenizer.__getstate__()


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_says_so() -> None:
    tokens = [*"abc", "abc"]
    for pre, ids in (("llama-bpe", [3]), ("gpt-2", [0, 1, 2])):
        hf = rebuild(metadata_file(model="gpt2", pre=pre, tokens=tokens, merges=[]))
        assert hf.encode("abc", add_special_tokens=False).ids == ids


@pytest.mark.parametrize(
    ("pre", "flags", "wanted"),
    [
        ("llama-bpe", {}, [0, "x"]),
        ("llama-bpe", {"add_bos_token": False}, ["x"]),
        ("gpt-2", {}, ["x"]),
        ("gpt-2", {"add_bos_token": True}, [0, "x"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [0, "x", 1]),
        ("gpt-2", {"add_eos_token": True}, ["x", 1]),
    ],
)
def test_start_and_end_tokens_are_added_as_the_file_says(
    pre: str, flags: dict[str, bool], wanted: list[Any]
) -> None:
    file = byte_level_file(ORIGINALS["gpt-2"], pre, bos_token_id=0, eos_token_id=1, **flags)
    hf = rebuild(file)
    (x,) = hf.encode("x", add_special_tokens=False).ids
    assert hf.encode("x").ids == [x if one == "x" else one for one in wanted]


def test_user_defined_tokens_are_found_but_not_special() -> None:
    hf = ORIGINALS["gpt-2"]
    file = byte_level_file(hf, "gpt-2")
    tokens, kinds = (
        file.metadata["tokenizer.ggml.tokens"],
        file.metadata["tokenizer.ggml.token_type"],
    )
    tokens.append("<tool_call>")
    kinds.append(4)
    tokenizer = Tokenizer(rebuild(file))
    number = len(tokens) - 1
    assert number in tokenizer.encode("a<tool_call>b")
    assert not tokenizer.is_special(number)
    assert tokenizer.decode([number], skip_special=True) == "<tool_call>"


# --- the sentencepiece kind

PIECES = {  # in an order that the scores do not follow
    **{SPACE + "abc": -5.0, "a": -9.0, "abc": -3.0, "bc": -2.0, "b": -9.1, "ca": -6.0},
    **{"c": -9.2, SPACE + "a": -4.0, SPACE: -9.3, SPACE + SPACE: -7.0, "ab": -2.5, "é": -9.4},
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SP_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
SP_KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES)]
SP_SCORES = [0.0] * 259 + list(PIECES.values())


def sentencepiece_file(**more: Any) -> GgufFile:
    return metadata_file(
        model="llama",
        tokens=SP_TOKENS,
        token_type=SP_KINDS,
        scores=SP_SCORES,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        **more,
    )


def by_hand(text: str) -> list[int]:
    """Sentencepiece's BPE, naively: join the neighbours with the best score, leftmost first."""
    if not text:
        return []
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        joins = [
            (-PIECES[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in PIECES
        ]
        if not joins:
            break
        _, at = min(joins)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        spelled = [part] if part in PIECES else [f"<0x{byte:02X}>" for byte in part.encode()]
        ids += [SP_TOKENS.index(piece) for piece in spelled]
    return ids


SENTENCEPIECE = Tokenizer(rebuild(sentencepiece_file()), bos_id=1, eos_ids=(2,))


@given(st.text("abc é你🙂\n", max_size=20))
def test_sentencepiece_joins_by_score_and_spells_the_rest_in_bytes(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, add_special=False)
    assert ids == by_hand(text)
    assert SENTENCEPIECE.encode(text) == [1, *ids]
    assert SENTENCEPIECE.decode(ids) == text
    spelled = b"".join(map(SENTENCEPIECE.token_bytes, ids))
    assert spelled == (" " + text).encode() or not text


def test_sentencepiece_without_a_space_in_front() -> None:
    tokenizer = Tokenizer(rebuild(sentencepiece_file(add_space_prefix=False, add_bos_token=False)))
    assert tokenizer.encode("abc") == [SP_TOKENS.index("abc")]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


# --- files that cannot be used


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "kind 't5': know gpt2, llama"),
        ({"model": None}, r"has no tokenizer\.ggml\.model"),
        ({"pre": "klingon"}, r"'klingon', which is not known.*Known: .*smollm"),
        ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"merges": ["a q"]}, "merge 'a' 'q' makes no token"),
        ({"tokens": ["a", "a"]}, "holds a token twice"),
        ({"token_type": [1]}, "1 token types, 2 tokens"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_says_why(changes: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "merges": []}
    with pytest.raises(ModelError, match=message):
        rebuild(metadata_file(**fields | changes))


# --- from a real file


def test_a_file_gives_tokenizer_ends_and_template(tmp_path: pathlib.Path) -> None:
    hf = ORIGINALS["qwen2"]
    file = byte_level_file(hf, "qwen2")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(file.metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(file.metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(file.metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(7)
    writer.add_chat_template("{{ messages }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "tiny.gguf")
    assert tokenizer.encode(TEXTS[0]) == hf.encode(TEXTS[0]).ids
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1, 7))
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer.special_text(1) == "</s>"


@pytest.mark.slow
def test_smollm2_splits_digits_before_words(smollm2_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (49152, 1, (2,))
    assert tokenizer.chat_template is not None
    assert "named SmolLM, trained by Hugging Face" in tokenizer.chat_template
    names = [tokenizer.special_text(number) for number in range(17)]
    assert names[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert names[16] == "<empty_output>"
    assert not tokenizer.is_special(17)

    def pieces(text: str) -> list[str]:
        return [tokenizer.hf.id_to_token(number) for number in tokenizer.encode(text)]

    assert pieces("\n\n2.") == ["ĊĊ", "2", "."]
    assert pieces("  if x == 10:") == ["Ġ", "Ġif", "Ġx", "Ġ==", "Ġ", "1", "0", ":"]
    assert pieces("<|im_start|>user\n")[:2] == ["<|im_start|>", "user"]
    # As Hugging Face's own tokenizer.json of the model splits.
    digits = pre_tokenizers.Digits(individual_digits=True)
    own = tokenizers.Tokenizer.from_str(tokenizer.hf.to_str())
    own.pre_tokenizer = pre_tokenizers.Sequence([digits, GPT2])
    for text in TEXTS:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert own.encode(text).ids == tokenizer.encode(text)
