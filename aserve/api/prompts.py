"""Prompts to token ids, off the event loop when they are long enough to hold up other streams."""

from collections.abc import Mapping, Sequence
from typing import Any

import trio

from aserve.actors.engine import Engine
from aserve.actors.prompt import PromptReader
from aserve.actors.validate import Facts
from aserve.api.messages import plain_messages, plain_tools, teach_tools
from aserve.api.protocol import Message, Tool
from aserve.errors import RequestError

INLINE_CHARS = 4096  # about a millisecond of tokenising
RESERVED = ("add_generation_prompt", "continue_final_message", "messages", "tools", "chat_template")
Tokens = Sequence[int]


class Chat:
    """The parts of a chat request that make its prompt."""

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        self.messages = plain_messages(messages)
        self.tools = plain_tools(tools)
        self.continued = bool(continue_final_message)
        if self.continued and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        if self.continued and not self.messages[-1]["content"].strip():
            raise RequestError(
                "continue_final_message needs a last message with content to continue.",
                param="continue_final_message",
            )
        opens = not self.continued if add_generation_prompt is None else add_generation_prompt
        self.template_kwargs = {**_free(template_kwargs), "add_generation_prompt": opens}


def _free(template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for name in template_kwargs or ():
        if name in RESERVED:
            raise RequestError(
                f"chat_template_kwargs may not set {name}; use the request's own field.",
                param="chat_template_kwargs",
            )
    return template_kwargs or {}


class Prompts:
    """Reads prompts for one engine."""

    def __init__(self, engine: Engine) -> None:
        facts = Facts(engine.context_len, engine.vocab_size, engine.config.limits)
        self._reader = PromptReader(engine.tokenizer, facts)
        template = engine.tokenizer.chat_template
        self.template_has_tools = template is not None and "tools" in template

    async def text(self, text: str, *, special: bool = True) -> Tokens:
        """A bare prompt. Raises RequestError: not text, longer than any context."""
        (tokens,) = await self.texts([text], special=special)
        return tokens

    async def texts(self, given: Sequence[str | Tokens], *, special: bool = True) -> list[Tokens]:
        """Texts made tokens; what is tokens stays as it is."""

        def encode() -> list[Tokens]:
            return [
                self._reader.encode(one, special=special) if isinstance(one, str) else one
                for one in given
            ]

        if sum(len(one) for one in given if isinstance(one, str)) <= INLINE_CHARS:
            return encode()
        return await trio.to_thread.run_sync(encode, abandon_on_cancel=True)

    async def chat(self, chat: Chat, body_len: int) -> Tokens:
        """Of a request of `body_len` bytes.

        Raises RequestError: the template refuses the messages, there is none, too long.
        """
        if body_len <= INLINE_CHARS and not chat.tools:
            return self._chat(chat)
        return await trio.to_thread.run_sync(self._chat, chat, abandon_on_cancel=True)

    def _chat(self, chat: Chat) -> Tokens:
        messages, tools = chat.messages, chat.tools
        if not self.template_has_tools:
            messages, tools = teach_tools(messages, tools), []
        text = self._reader.render(messages, tools or None, chat.template_kwargs)
        if chat.continued:
            text = _cut_after(text, self._reader.quote(messages[-1]["content"].strip()))
        return self._reader.encode_chat(text)


def _cut_after(text: str, final: str) -> str:
    """The rendered chat up to the end of its last message's content, to go on from there."""
    start = text.rfind(final)
    if start < 0:
        raise RequestError(
            "The chat template does not show the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    return text[: start + len(final)]
