"""Conversations as tokens in safetensors files of some dozens each, and files that appear whole.

Nothing here knows what a model is.
"""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy
import safetensors.torch
from torch import Tensor

from aserve.errors import ConfigError, ModelError

# Who wrote a token: the template or a given question, the target as the user, the target answering.
GIVEN, ASKED, ANSWER = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """`tokens` (int32) and by whom each is (uint8), in order."""

    tokens: npt.NDArray[np.int32]
    writers: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.tokens)


def save_conversations(
    path: pathlib.Path, conversations: Sequence[Conversation], numbers: Sequence[int] | None = None
) -> None:
    """`numbers` of them, where they are not simply the next ones."""
    none = np.zeros(0, dtype=np.uint8)
    parts = {
        "tokens": np.concatenate([none, *(c.tokens for c in conversations)]).astype(np.int32),
        "writers": np.concatenate([none, *(c.writers for c in conversations)]).astype(np.uint8),
        "lengths": np.array([len(c) for c in conversations], dtype=np.int32),
    }
    if numbers is not None:
        parts["numbers"] = np.array(numbers, dtype=np.int64)
    write_whole(path, safetensors.numpy.save(parts))


def load_conversations(path: pathlib.Path) -> list[Conversation]:
    """Raises ModelError for a damaged file, or one of another shape."""
    return _conversations(path, _parts(path))


def load_numbered(path: pathlib.Path) -> dict[int, Conversation]:
    """What was saved with numbers. Raises ModelError as `load_conversations` does."""
    parts = _parts(path)
    found, numbers = _conversations(path, parts), parts.get("numbers")
    if numbers is None or len(numbers) != len(found):
        raise ModelError(f"{path} holds no numbered conversations")
    return dict(zip(numbers.tolist(), found, strict=True))


Parts = dict[str, npt.NDArray[Any]]


def _parts(path: pathlib.Path) -> Parts:
    try:
        parts: Parts = safetensors.numpy.load_file(path)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} holds no conversations, or is cut off: {error}") from error
    return parts


def _conversations(path: pathlib.Path, parts: Parts) -> list[Conversation]:
    if missing := [name for name in ("tokens", "writers", "lengths") if name not in parts]:
        raise ModelError(f"{path} holds no conversations: it lacks {', '.join(missing)}")
    tokens, writers, lengths = parts["tokens"], parts["writers"], parts["lengths"]
    if tokens.shape != writers.shape or tokens.ndim != 1 or int(lengths.sum()) != len(tokens):
        raise ModelError(f"{path} holds no conversations: its parts differ in length")
    if not len(lengths):
        return []
    cuts = np.cumsum(lengths)[:-1]
    pairs = zip(np.split(tokens, cuts), np.split(writers, cuts), strict=True)
    return [Conversation(ids, by) for ids, by in pairs]


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """The file is there with all of its bytes, or is what it was before."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(
    path: pathlib.Path, tensors: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> None:
    """As `write_whole`; `notes` go into the header."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_whole(path, safetensors.torch.save(whole, metadata=dict(notes or {}) or None))


def read_questions(path: str) -> list[list[dict[str, str]]]:
    """The conversations of a JSON lines file: in each line {"messages": [...]} or {"prompt": text}.

    Messages that end with one of the user's are answered by the target; a last one of the
    assistant's is learnt as it stands. Raises ConfigError that names the line.
    """
    found = []
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_messages(line, f"--data {path}, line {number}"))
    if len(found) < 2:
        raise ConfigError(f"--data {path} has {len(found)} conversations; at least 2 are needed")
    return found


def _messages(line: str, where: str) -> list[dict[str, str]]:
    shape = 'is no {"messages": [{"role": ..., "content": ...}, ...]} and no {"prompt": text}'
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} {shape}")
    if isinstance(value.get("prompt"), str) and value["prompt"].strip():
        return [{"role": "user", "content": value["prompt"]}]
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where} {shape}")
    for message in messages:
        fits = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not fits or message["role"] not in ("system", "user", "assistant"):
            raise ConfigError(f"{where} {shape}")
    if not any(message["role"] == "user" for message in messages):
        raise ConfigError(f"{where} has no message of the user's")
    return [{"role": m["role"], "content": m["content"]} for m in messages]
