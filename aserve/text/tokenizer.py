"""Text to token ids and back, for tokenizer.json and for the vocabulary of a GGUF file.

What a stream of tokens means as text is detokenizer.py's business; here is the one-shot form, and
what one token is in bytes.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from aserve.errors import ModelError, RequestError
from aserve.text import gguf_tokenizer
from aserve.text.detokenizer import byte_level
from aserve.text.gguf_file import open_gguf
from aserve.text.gguf_tokenizer import SPACE

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Inside quoted text; a code point that is no character, so it means nothing in any text.
MARK = "\ufdd0"
MARKS = re.compile(f"{MARK}({MARK}?)")
GGUF_ENDS = ("eos", "eot", "eom")  # of text, of a turn, of a message to a tool


class Tokenizer:
    """`vocab_size` is one more than the largest id; a model may pad its vocabulary beyond that."""

    def __init__(
        self,
        hf: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        hf.no_truncation()
        hf.no_padding()
        self.hf = hf
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.chat_template = chat_template
        added = hf.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}
        self._special_ids = {text: number for number, text in self._special.items()}
        self.vocab_size = max(hf.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._bytes_of = _bytes_of(hf)

    @functools.cached_property
    def bytes_max(self) -> int:
        """What the longest token adds to a text, in bytes."""
        return max([len(self.token_bytes(token)) for token in range(self.vocab_size)], default=0)

    def encode(
        self, text: str, add_special: bool = True, *, parse_special: bool = True
    ) -> list[int]:
        """Ids of `text`. `add_special` puts the model's own start (and end) token around it;
        without `parse_special` the names of special tokens are text like any other.

        Raises RequestError for text that is no Unicode (half a surrogate pair).
        """
        hf = self.hf if parse_special else self._plain
        try:
            ids: list[int] = hf.encode(text, add_special_tokens=add_special).ids
        except TypeError as error:
            raise RequestError("the text is not valid Unicode: half a surrogate pair") from error
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """The text of all ids at once. Bytes that are no character become U+FFFD; ids that are in
        no vocabulary are left out, or a RequestError beyond 32 bits."""
        try:
            text: str = self.hf.decode(ids, skip_special_tokens=skip_special)
        except OverflowError as error:
            raise RequestError(f"a token id is no id: {error}") from error
        return text

    def token_bytes(self, token: int) -> bytes:
        """What the token adds to the text, exactly; b"" for special and unknown ones."""
        if token in self._special or not 0 <= token < self.vocab_size:
            return b""
        piece = self.hf.id_to_token(token)
        return b"" if piece is None else self._bytes_of(piece)

    def is_special(self, token: int) -> bool:
        return token in self._special

    def special_text(self, token: int) -> str:
        """A special token as it is written, "" for any other."""
        return self._special.get(token, "")

    def quote(self, value: Any) -> Any:
        """JSON-like `value` with a mark inside each text that is written like a special token.

        For what a client puts into a chat template: `encode_quoted` gives its `<|im_end|>` the ids
        of that text, while the template's own is the token. Other text is as it was.
        """
        if isinstance(value, str):
            value = value.replace(MARK, MARK + MARK)
            return self._specials.sub(lambda name: name[0][:1] + MARK + name[0][1:], value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(part) for key, part in value.items()}
        return [self.quote(part) for part in value] if isinstance(value, list | tuple) else value

    def encode_quoted(self, text: str) -> list[int]:
        """Ids of text that has parts from `quote`; without any, of `encode(text, False)`."""
        if MARK not in text:
            return self.encode(text, add_special=False)
        ids: list[int] = []
        at = 0
        for name in self._specials.finditer(text):
            ids += self._encode_text(text[at : name.start()])
            ids.append(self._special_ids[name[0]])
            at = name.end()
        return ids + self._encode_text(text[at:])

    def _encode_text(self, quoted: str) -> list[int]:
        text = MARKS.sub(r"\1", quoted)
        return self.encode(text, add_special=False, parse_special=False) if text else []

    @functools.cached_property
    def _specials(self) -> re.Pattern[str]:
        """The names of special tokens, the longest first; nothing if there are none."""
        names = sorted(filter(None, self._special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        # The switch is a property of the whole tokenizer, which other threads may be using.
        plain = tokenizers.Tokenizer.from_str(self.hf.to_str())
        plain.encode_special_tokens = True
        return plain


def load_tokenizer(
    path: str | os.PathLike[str], chat_template_path: str | os.PathLike[str] | None = None
) -> Tokenizer:
    """The tokenizer of a model folder or .gguf file; `chat_template_path` replaces its template.

    Raises ModelError if there is none, or it is damaged.
    """
    path = pathlib.Path(path)
    tokenizer = _from_gguf(path) if path.is_file() else _from_folder(path)
    if chat_template_path is not None:
        tokenizer.chat_template = _text(pathlib.Path(chat_template_path))
    return tokenizer


def _from_gguf(path: pathlib.Path) -> Tokenizer:
    file = open_gguf(path)
    vocabulary = gguf_tokenizer.Vocabulary(file)
    ends = [vocabulary.id_of(key) for key in GGUF_ENDS]
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        gguf_tokenizer.rebuild(file),
        eos_ids=list(dict.fromkeys(number for number in ends if number is not None)),
        bos_id=vocabulary.id_of("bos"),
        chat_template=template if isinstance(template, str) else None,
    )


def _from_folder(folder: pathlib.Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json; fetch it with the model")
    try:
        hf = tokenizers.Tokenizer.from_str(_text(path))
    except Exception as error:  # the package raises no narrower one
        raise ModelError(f"{path} is damaged: {error}") from error
    config = _json(folder / "tokenizer_config.json")
    model, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    ends = [
        *_ids(generation.get("eos_token_id")),
        *_ids(model.get("eos_token_id")),
        *_named(hf, config.get("eos_token")),
    ]
    starts = [*_named(hf, config.get("bos_token")), *_ids(model.get("bos_token_id"))]
    return Tokenizer(
        hf,
        eos_ids=list(dict.fromkeys(ends)),
        bos_id=next(iter(starts), None),
        chat_template=_template(folder, config.get("chat_template")),
    )


def _template(folder: pathlib.Path, configured: Any) -> str | None:
    """A file of its own goes before tokenizer_config.json; of several named ones, the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _text(path)
    if isinstance(configured, list):
        named = {str(entry.get("name")): entry.get("template") for entry in configured}
        configured = named.get("default")
    return configured if isinstance(configured, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0]


def _named(hf: tokenizers.Tokenizer, token: Any) -> list[int]:
    """A token given as its text, or as an object that holds the text."""
    text = token.get("content") if isinstance(token, dict) else token
    return _ids(hf.token_to_id(text)) if isinstance(text, str) else []


def _json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _bytes_of(hf: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this tokenizer's decoder turns one piece, in the middle of a text, into bytes."""
    spec = "" if hf.decoder is None else str(hf.decoder.__getstate__(), "utf-8")
    if '"ByteLevel"' in spec:
        return byte_level
    fallback = '"ByteFallback"' in spec
    marks = SPACE in spec

    def piece_bytes(piece: str) -> bytes:
        if fallback and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (piece.replace(SPACE, " ") if marks else piece).encode()

    return piece_bytes
