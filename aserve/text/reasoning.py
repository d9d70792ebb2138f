"""Splits `<think>...</think>` off streamed text, as Qwen3, DeepSeek-R1 and their kin write it."""

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"

Where = Literal["before", "inside", "after"]


def wants_reasoning(template: str | None) -> bool:
    """Whether a chat template speaks of thinking at all."""
    return template is not None and CLOSE in template


def starts_where(prompt: str) -> Where:
    """Where the model's first character stands, given the rendered prompt.

    A generation prompt that ends in `<think>` starts inside; one that ends in a closed block
    (thinking switched off) starts after it; else the model may open a block itself.
    """
    text = prompt.rstrip()
    if text.endswith(OPEN):
        return "inside"
    return "after" if text.endswith(CLOSE) else "before"


def held_len(text: str, tag: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `tag`."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if tag.startswith(text[-length:]):
            return length
    return 0


class ReasoningParser:
    """Text in, (reasoning, content) out; all parts joined are the input without the two tags.

    A block is reasoning only if nothing but white space precedes it, and one block at most is
    taken: a later tag is content like any other text. A block that never closes is all reasoning.
    """

    def __init__(self, where: Where = "before") -> None:
        self._where = where
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning = ""
        if self._where == "before":
            self._open()
        if self._where == "inside":
            reasoning = self._close()
        if self._where != "after":
            return reasoning, ""
        content, self._held = self._held, ""
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """What was held back because it could have become a tag."""
        held, self._held = self._held, ""
        return (held, "") if self._where == "inside" else ("", held)

    def _open(self) -> None:
        stripped = self._held.lstrip()
        if stripped.startswith(OPEN):
            white_len = len(self._held) - len(stripped)
            self._held = self._held[:white_len] + stripped[len(OPEN) :]
            self._where = "inside"
        elif not OPEN.startswith(stripped):
            self._where = "after"

    def _close(self) -> str:
        at = self._held.find(CLOSE)
        if at >= 0:
            self._where = "after"
            reasoning, self._held = self._held[:at], self._held[at + len(CLOSE) :]
            return reasoning
        safe_len = len(self._held) - held_len(self._held, CLOSE)
        reasoning, self._held = self._held[:safe_len], self._held[safe_len:]
        return reasoning
