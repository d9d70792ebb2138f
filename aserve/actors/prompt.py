"""What a client may send as a prompt (text, token ids, chat messages), made into token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from aserve.actors.validate import Facts, refused, too_long
from aserve.text import chat
from aserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
NO_PROMPT = "must be a string, a list of token ids or chat messages"


class PromptReader:
    """Holds what reading needs: the tokenizer, the chat template and the model's limits."""

    def __init__(self, tokenizer: Tokenizer, facts: Facts) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        # Text longer than this cannot fit, so it need not be tokenised to be refused.
        self._bytes_max = facts.context_len * max(tokenizer.bytes_max, 64)

    def tokens(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Raises RequestError for anything that is not a prompt. Emptiness is checked later."""
        if isinstance(prompt, str):
            return self.encode(prompt)
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
            raise refused("prompt", NO_PROMPT)
        if prompt and isinstance(prompt[0], Mapping):
            if not all(isinstance(part, Mapping) for part in prompt):
                raise refused("prompt", NO_PROMPT)
            messages: Any = prompt
            return self.encode_chat(self.render(messages, tools, template_kwargs))
        if len(prompt) > self._facts.context_len:  # before anybody walks over millions of them
            raise too_long(len(prompt), None, self._facts.context_len)
        ids: list[int] = []
        for part in prompt:
            if isinstance(part, bool) or not isinstance(part, int):
                raise refused("prompt", NO_PROMPT)
            ids.append(part)
        return tuple(ids)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """`special` adds the tokens that a bare text starts with (BOS), as the model's own."""
        self._check_text(text)
        return tuple(self._tokenizer.encode(text, add_special=special))

    def encode_chat(self, text: str) -> tuple[int, ...]:
        """Of `render`'s text; special tokens that a client wrote are text."""
        self._check_text(text)
        return tuple(self._tokenizer.encode_quoted(text))

    def quote(self, text: str) -> str:
        """A message's text as `render` shows it."""
        quoted: str = self._tokenizer.quote(text)
        return quoted

    def _check_text(self, text: str) -> None:
        try:
            encoded = text.encode()
        except UnicodeEncodeError as error:
            raise refused(
                "prompt", "must be valid Unicode text (it holds a lone surrogate)"
            ) from error
        if len(encoded) > self._bytes_max:
            least = self._facts.context_len + 1
            raise too_long(least, None, self._facts.context_len)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The chat template over `messages`; the text is for `encode_chat` only."""
        names = {
            "bos_token": self._special(self._tokenizer.bos_id),
            "eos_token": self._special(next(iter(self._tokenizer.eos_ids), None)),
        }
        return chat.render(
            self._tokenizer.chat_template,
            messages,
            tools=tools,
            special_tokens=names,
            quote=self._tokenizer.quote,
            **(template_kwargs or {}),
        )

    def _special(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.special_text(token)
