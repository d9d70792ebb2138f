"""Token ids in, text out, a few at a time: the pieces joined are the one-shot decoding, exactly.

The tokenizer's decoder is read once as data and run as a stream. Byte-level BPE and the
sentencepiece kinds (byte fallback, Metaspace) are exact by construction; a decoder of another kind
is driven through a bounded window of recent tokens, which is what its own streaming does.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WINDOW_LEN_MAX = 64  # tokens a window decoder may hold back before it shows what it has


class Source(Protocol):
    """What is needed of a text.Tokenizer."""

    @property
    def hf(self) -> tokenizers.Tokenizer: ...


class Stream(Protocol):
    """Pieces (not ids) of one text, special tokens already left out.

    Where it `holds` nothing, the text of the next piece does not depend on those before.
    """

    holds: bool

    def push(self, token: str) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """`"".join(push(...)) + flush() == tokenizer.decode(ids, skip_special)`, however ids are cut.

    A character is never split: bytes wait until they are a character or can no longer become one,
    and are then replaced just as the one-shot decoding replaces them. With `continues` the text
    follows other text, so a leading space that a sentencepiece decoder would strip is kept.
    """

    def __init__(
        self, tokenizer: Source, skip_special: bool = True, continues: bool = False
    ) -> None:
        pieces = pieces_of(tokenizer.hf)
        self._text_of = pieces.text_of
        self._skip = pieces.special if skip_special else frozenset()
        self._stream = pieces.open(continues)
        self._whole = pieces.whole[skip_special]

    def push(self, ids: Sequence[int]) -> str:
        """Text that these ids complete. Ids the tokenizer does not know give nothing."""
        if len(ids) == 1:
            text = None if self._stream.holds else self._whole.get(ids[0])
            return self._one(ids[0]) if text is None else text
        return "".join([self._one(token) for token in ids])

    def _one(self, token: int) -> str:
        if token in self._skip:
            return ""
        piece = self._text_of(token)
        if piece is None:
            return ""
        held = self._stream.holds
        text = self._stream.push(piece)
        if not (held or self._stream.holds):
            self._whole[token] = text
        return text

    def flush(self) -> str:
        """The text of what was held back, replaced where it is no character."""
        return self._stream.flush()


class Pieces:
    """What the decoder of one tokenizer needs, made once and shared by its detokenizers."""

    def __init__(self, hf: tokenizers.Tokenizer) -> None:
        self._hf = hf
        added = hf.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self._texts: dict[int, str | None] = {}
        # Of tokens met that begin and end between characters; by whether special ones are left out.
        self.whole: dict[bool, dict[int, str]] = {False: {}, True: {}}
        spec = json.loads(hf.decoder.__getstate__()) if hf.decoder is not None else None
        self._open = _stream_of(spec)

    def text_of(self, token: int) -> str | None:
        try:
            return self._texts[token]
        except KeyError:
            text = self._texts[token] = self._hf.id_to_token(token) if token >= 0 else None
            return text

    def open(self, continues: bool) -> Stream:
        if self._open is None:
            decoder = self._hf.decoder
            return WindowStream(decoder.decode if decoder is not None else " ".join)
        return self._open(continues)


@lru_cache(maxsize=16)
def pieces_of(hf: tokenizers.Tokenizer) -> Pieces:
    return Pieces(hf)


def _stream_of(spec: dict[str, Any] | None) -> Callable[[bool], Stream] | None:
    """How to open a stream for a decoder as `tokenizer.json` spells it; None: only a window can."""
    parts = _flat(spec)
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return lambda continues: ByteLevelStream()
    if kinds == ["Metaspace"]:
        mark = parts[0]["replacement"]
        strips = parts[0].get("prepend_scheme", "always") != "never"
        return lambda continues: MetaspaceStream(mark, strips and not continues)
    replaces: list[tuple[str, str]] = []
    while parts and parts[0]["type"] == "Replace" and "String" in parts[0]["pattern"]:
        replaces.append((parts[0]["pattern"]["String"], parts[0]["content"]))
        parts = parts[1:]
    strip = parts[-1] if parts and parts[-1]["type"] == "Strip" else None
    middle = [part["type"] for part in parts[: -1 if strip else None]]
    if middle != ["ByteFallback", "Fuse"] or (strip and strip["stop"]):
        return None
    content, strip_len = (strip["content"], strip["start"]) if strip else ("", 0)
    return lambda continues: FallbackStream(replaces, content, 0 if continues else strip_len)


def _flat(spec: dict[str, Any] | None) -> list[dict[str, Any]]:
    if spec is None:
        return []
    if spec["type"] != "Sequence":
        return [spec]
    return [part for inner in spec["decoders"] for part in _flat(inner)]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 upwards."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


BYTE_OF_CHAR = _byte_of_char()


@lru_cache(maxsize=1 << 17)
def byte_level(token: str) -> bytes:
    """Bytes of a byte-level piece; a piece with any other character is taken as it is written."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1 << 17)
def whole_text(token: str) -> str | None:
    """The text of a byte-level piece that begins and ends between characters, as most do."""
    try:
        return byte_level(token).decode()
    except UnicodeDecodeError:
        return None


class ByteLevelStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.holds = False  # part of a character

    def push(self, token: str) -> str:
        if not self.holds and (whole := whole_text(token)) is not None:
            return whole
        text = self._decoder.decode(byte_level(token))
        self.holds = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self.holds = False
        return text


class MetaspaceStream:
    """Spaces are written as a mark; the first piece loses its marks if `strips`."""

    holds = True

    def __init__(self, mark: str, strips: bool) -> None:
        self._mark = mark
        self._strips = strips

    def push(self, token: str) -> str:
        space = "" if self._strips else " "
        self._strips = False
        return token.replace(self._mark, space)

    def flush(self) -> str:
        return ""


class FallbackStream:
    """Replace, then bytes spelled `<0xE2>`, then a strip of up to `strip_len` leading `content`.

    The one-shot decoder replaces every byte of a run of byte pieces if any of it is not UTF-8, so
    a run has to end before any of its characters is known.
    """

    holds = True
    BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

    def __init__(self, replaces: list[tuple[str, str]], content: str, strip_len: int) -> None:
        self._replaces = replaces
        self._content = content
        self._strip_len = strip_len
        self._run = bytearray()

    def push(self, token: str) -> str:
        for pattern, content in self._replaces:
            token = token.replace(pattern, content)
        if byte := self.BYTE.match(token):
            self._run.append(int(byte[1], 16))
            return ""
        return self._strip(self._end_run() + token)

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_len and text:
            if not text.startswith(self._content):
                self._strip_len = 0
                break
            text = text[len(self._content) :]
            self._strip_len -= 1
        return text


class WindowStream:
    """Decodes the last tokens again with each new one and shows what was added.

    `[0, shown)` of the window was shown; it stays as context so that the rest is spelled as in
    mid-text. A tail that ends in a replacement character waits, as it may be half a character.
    """

    holds = True

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._window: list[str] = []
        self._shown_len = 0

    def push(self, token: str) -> str:
        self._window.append(token)
        held_len = len(self._window) - self._shown_len
        return self._show(force=held_len > WINDOW_LEN_MAX)

    def flush(self) -> str:
        return self._show(force=True)

    def _show(self, force: bool) -> str:
        before = self._decode(self._window[: self._shown_len]) if self._shown_len else ""
        after = self._decode(self._window) if self._window else ""
        if not force and (after.endswith(REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._window = self._window[self._shown_len :]
        self._shown_len = len(self._window)
        return after[len(before) :]
