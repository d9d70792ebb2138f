"""One answer as it streams in: its text to the terminal, the rest kept for the JSON."""

import sys
from collections.abc import Iterable

from aserve.core.message import TokenLogprob
from aserve.core.request import Delta, Usage


class Answer:
    """Collects the deltas of one choice; `write` shows their text on stdout as they come."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.usage: Usage | None = None
        self.error: str | None = None

    def take(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.usage = delta.usage or self.usage
        self.error = delta.error or self.error

    def read(self, deltas: Iterable[Delta], *, show: bool) -> None:
        """Take every delta; `show` writes text to stdout at once, ended by a line break."""
        for delta in deltas:
            self.take(delta)
            if show and delta.text:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        if show and not self.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()

    def as_json(self, *, logprobs: bool = False) -> dict[str, object]:
        """`{"text", "token_ids", "finish_reason", "usage"}` and, if wanted, `"logprobs"`."""
        found: dict[str, object] = {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "usage": usage_json(self.usage),
        }
        if logprobs:
            found["logprobs"] = [logprob_json(entry) for entry in self.logprobs]
        return found


def usage_json(usage: Usage | None) -> dict[str, int] | None:
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.cached_tokens,
        "target_steps": usage.target_steps,
    }


def logprob_json(entry: TokenLogprob) -> dict[str, object]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return {"token_id": entry.token, "logprob": entry.logprob, "top": top}
