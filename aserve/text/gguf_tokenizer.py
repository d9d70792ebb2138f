"""A `tokenizers.Tokenizer` rebuilt from the vocabulary in a GGUF file.

Two kinds: byte-level BPE ("gpt2", split first by the pattern that `tokenizer.ggml.pre` names) and
sentencepiece BPE ("llama", merges by score, unknown characters as bytes). The patterns are those of
the models' own tokenizer.json files, as llama.cpp lists them; a wrong one costs a model its sense
silently, so an unknown name is an error.
"""

import re
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from aserve.errors import ModelError
from aserve.text.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how sentencepiece writes a space

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{suffix}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{suffix}"
)
_WORD = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = _REST.replace(r"]+[\r\n]*", r"]+[\r\n/]*")

LLAMA3 = (_WORD + r"|\p{N}{1,3}" + _REST,)
QWEN2 = (_WORD + r"|\p{N}" + _REST,)
TEKKEN = (_CASED.replace("{suffix}", "") + r"|\p{N}" + _REST_SLASH,)
GPT4O = (_CASED.replace("{suffix}", _SUFFIX + "?") + r"|\p{N}{1,3}" + _REST_SLASH,)
GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
SMOLLM = (r"\p{N}", *GPT2)
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

# Each text is split by these patterns in turn.
PATTERNS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), QWEN2),
    **dict.fromkeys(("tekken",), TEKKEN),
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "phi-2", "trillion", "gigachat"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), SMOLLM),
    **dict.fromkeys(("exaone", "minerva-7b"), SMOLLM),
}
# A word that is a token stands for itself, even if no merges lead there.
IGNORE_MERGES = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}
ADD_BOS = IGNORE_MERGES  # where the file does not say
NFC = {"qwen2", "deepseek-r1-qwen"}  # composed before anything else, as in Qwen's tokenizer.json


class Vocabulary:
    """The `tokenizer.ggml.*` keys, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self._metadata = file.metadata
        self.kind: str = self._get("model", str)
        self.pre: str = self._get("pre", str, "default")
        self.tokens: list[str] = self._get("tokens", list)
        kinds = self._get("token_type", list, [])
        self.kinds: list[int] = kinds or [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise ModelError(f"{self.path}: {len(kinds)} token types, {len(self.tokens)} tokens")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise ModelError(f"{self.path}: the vocabulary holds a token twice")

    def _get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise ModelError(f"{self.path} has no tokenizer.ggml.{key}, so no tokenizer")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._get(key, int, default))

    def id_of(self, key: str) -> int | None:
        """`bos`, `eos`, ... as an id of the vocabulary, if the file has one."""
        value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self._get("merges", list)]
        return [(left, right) for left, _, right in pairs]

    def scores(self) -> list[float]:
        scores: list[float] = self._get("scores", list, [])
        return scores or [-float(number) for number in range(len(self.tokens))]


def rebuild(file: GgufFile) -> tokenizers.Tokenizer:
    """Raises ModelError if the vocabulary is damaged or of an unknown kind."""
    vocabulary = Vocabulary(file)
    if vocabulary.kind not in BUILDERS:
        raise ModelError(
            f"{file.path} has a tokenizer of kind {vocabulary.kind!r}: know {', '.join(BUILDERS)}"
        )
    hf = BUILDERS[vocabulary.kind](vocabulary)
    _add_tokens(hf, vocabulary)
    _add_template(hf, vocabulary)
    if hf.get_vocab_size() != len(vocabulary.tokens):
        raise ModelError(
            f"{file.path}: {len(vocabulary.tokens)} tokens, but the tokenizer rebuilt from them "
            f"has {hf.get_vocab_size()}"
        )
    return hf


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    pre = vocabulary.pre
    if pre not in PATTERNS:
        raise ModelError(
            f"{vocabulary.path} splits text by {pre!r}, which is not known; take the model in "
            f"Hugging Face layout, with its tokenizer.json. Known: {', '.join(sorted(PATTERNS))}"
        )
    hf = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_possible(vocabulary),
            ignore_merges=pre in IGNORE_MERGES,
        )
    )
    splits = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in PATTERNS[pre]
    ]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    hf.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    hf.decoder = decoders.ByteLevel()
    if pre in NFC:
        hf.normalizer = normalizers.NFC()
    return hf


def _possible(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges, ids = vocabulary.merges(), vocabulary.ids
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{vocabulary.path}: merge {left!r} {right!r} makes no token")
    return merges


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    unknown = vocabulary.id_of("unknown")
    hf = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary),
            unk_token=vocabulary.tokens[unknown or 0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    to_mark = normalizers.Replace(" ", SPACE)
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        hf.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_mark])
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        hf.normalizer = to_mark
    hf.decoder = decoders.Sequence(parts)
    return hf


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens to a third, best third first (sentencepiece's BPE)."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    if len(scores) != len(vocabulary.tokens):
        raise ModelError(f"{vocabulary.path}: {len(scores)} scores for {len(ids)} tokens")
    found = []
    for number, token in enumerate(vocabulary.tokens):
        if vocabulary.kinds[number] not in (NORMAL, USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for _, _, left, right in found]


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_tokens(hf: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are special; user-defined ones are found in text but shown like it."""
    by_kind = {
        kind: [t for t, k in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if k == kind]
        for kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }
    special = by_kind[CONTROL] + (by_kind[UNKNOWN] if vocabulary.kind == "llama" else [])
    hf.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    defined = [text for text in by_kind[USER_DEFINED] if text.strip(SPACE)]
    hf.add_tokens([AddedToken(text, special=False, normalized=False) for text in defined])


def _add_template(hf: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    bos, eos = vocabulary.id_of("bos"), vocabulary.id_of("eos")
    adds_bos = vocabulary.flag("add_bos_token", vocabulary.kind == "llama" or pre_adds(vocabulary))
    ends = [
        (vocabulary.tokens[number], number)
        for number, adds in ((bos, adds_bos), (eos, vocabulary.flag("add_eos_token", False)))
        if adds and number is not None
    ]
    if not ends:
        return
    first = [_piece(text) for text, number in ends if number == bos and adds_bos]
    last = [_piece(text) for text, number in ends if not (number == bos and adds_bos)]
    hf.post_processor = processors.TemplateProcessing(
        single=" ".join([*first, "$A", *last]),
        pair=" ".join([*first, "$A", *first, "$B:1", *last]),
        special_tokens=ends,
    )


def pre_adds(vocabulary: Vocabulary) -> bool:
    return vocabulary.kind == "gpt2" and vocabulary.pre in ADD_BOS


def _piece(text: str) -> str:
    if re.search(r"[\s:]", text):
        raise ModelError(f"{text!r} cannot be put before every text")
    return text
