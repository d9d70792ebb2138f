"""Token log-probabilities in OpenAI's two formats (chat, completions) and vLLM's prompt format."""

import codecs
import math
from collections.abc import Sequence
from typing import Any

from aserve.core.message import TokenLogprob
from aserve.text.tokenizer import Tokenizer

# JSON has no -inf; this is OpenAI's own number for "very unlikely".
LOWEST = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


class TokenNames:
    """What tokens are called in answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def raw(self, token: int) -> bytes:
        if self._tokenizer.is_special(token):
            return self._tokenizer.special_text(token).encode()
        return self._tokenizer.token_bytes(token)

    def visible(self, token: int, skip_special: bool) -> bytes:
        """The token's part of the text; nothing for a special token that is left out."""
        if skip_special and self._tokenizer.is_special(token):
            return b""
        return self.raw(token)

    def name(self, token: int) -> str:
        return self.raw(token).decode(errors="replace")

    def unique_name(self, token: int) -> str:
        """As in OpenAI's completions: part of a character is spelled `bytes:\\xe2\\x80`."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            {
                **self._chat_entry(found.token, found.logprob),
                "top_logprobs": [self._chat_entry(token, value) for token, value in found.top],
            }
            for found in logprobs
        ]

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.raw(token)
        name = raw.decode(errors="replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}

    def prompt(
        self, logprobs: Sequence[TokenLogprob | None]
    ) -> list[dict[str, dict[str, Any]] | None]:
        """vLLM's `prompt_logprobs`: by token id, the prompt's own token first."""
        return [None if found is None else self._prompt_entry(found) for found in logprobs]

    def _prompt_entry(self, found: TokenLogprob) -> dict[str, dict[str, Any]]:
        pairs = ((found.token, found.logprob), *found.top)
        return {
            str(token): {"logprob": finite(value), "decoded_token": self.name(token)}
            for token, value in pairs
        }


class CompletionLogprobs:
    """One choice's `logprobs` object in `/v1/completions`, which may come in parts.

    `text_offset` counts the characters of the choice's text before each token; a token that ends
    in the middle of a character leaves that character to the next one.
    """

    def __init__(self, names: TokenNames, *, skip_special: bool) -> None:
        self._names = names
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def part(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> dict[str, list[Any]]:
        """For `tokens` with one entry of `logprobs` each (None: nothing predicts it)."""
        assert len(tokens) == len(logprobs)
        names = self._names
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            text = self._decoder.decode(names.visible(token, self._skip_special))
            self._offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [
                None if found is None else finite(found.logprob) for found in logprobs
            ],
            "tokens": [names.unique_name(token) for token in tokens],
            "top_logprobs": [None if found is None else self._top(found) for found in logprobs],
        }

    def _top(self, found: TokenLogprob) -> dict[str, float]:
        """The alternatives and the token itself, which OpenAI always adds."""
        pairs = (*found.top, (found.token, found.logprob))
        return {self._names.unique_name(token): finite(value) for token, value in pairs}
