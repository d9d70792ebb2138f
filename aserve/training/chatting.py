"""Conversations of a target with itself, or over given questions, by the engine.

What conversation `number` is follows from the seed and its number alone, so it does not matter in
which order, beside how many others, or after how many interruptions it is written.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine
from aserve.actors.llm import submit_when_room
from aserve.core.request import SamplingParams
from aserve.errors import ConfigError
from aserve.text import chat
from aserve.text.tokenizer import Tokenizer
from aserve.training.files import ANSWER, ASKED, GIVEN, Conversation
from aserve.training.prompts import HELD_OUT, question

Messages = list[dict[str, str]]
PLACEHOLDER = "placeholder-of-a-message"
ATTEMPTS_MAX = 4  # at a question of the target's own
ASKED_CHARS_MIN = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How conversations are held. Questions of its own are drawn at temperature 1 from the 40
    likeliest tokens (as in Xu et al. 2024, "Magpie"); half of the answers are greedy, as what is
    served at temperature 0 is foreseen best by a head that has seen such text."""

    seed: int = 0
    question_share: float = 0.5  # of conversations that begin with one of `prompts`
    greedy_share: float = 0.5
    turn_shares: tuple[float, ...] = (0.75, 0.2, 0.05)  # of one, two, three turns
    asked_len: int = 96
    answer_len: int = 256
    tokens_max: int = 640  # of a conversation


class Template:
    """A tokenizer's chat template, from messages to the ids a model goes on from."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError where there is no template, or it hides what the user says."""
        if tokenizer.chat_template is None:
            raise ConfigError(
                "this model has no chat template, and a draft head is trained on conversations: "
                "give it one with --model.chat_template FILE, a file with a Jinja template"
            )
        self._tokenizer = tokenizer
        if not self.asking([]):
            raise ConfigError("the chat template of this model does not show what the user says")

    def answering(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Up to where the assistant begins."""
        return self._tokenizer.encode_quoted(self._render(messages, True))

    def asking(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Up to where the user begins; nothing if that is nowhere."""
        text = self._render([*messages, {"role": "user", "content": PLACEHOLDER}], False)
        before, found, _ = text.rpartition(PLACEHOLDER)
        return self._tokenizer.encode_quoted(before) if found else []

    def _render(self, messages: Sequence[Mapping[str, Any]], is_asked: bool) -> str:
        names = {"bos_token": self._tokenizer.bos_id}
        names["eos_token"] = next(iter(self._tokenizer.eos_ids), None)
        special = {
            k: "" if v is None else self._tokenizer.special_text(v) for k, v in names.items()
        }
        return chat.render(
            self._tokenizer.chat_template,
            messages,
            add_generation_prompt=is_asked,
            special_tokens=special,
            quote=self._tokenizer.quote,
        )


class Author:
    """Writes conversations with an engine, any number at once."""

    def __init__(
        self, engine: Engine, manner: Manner, given: Sequence[Messages] | None = None
    ) -> None:
        """`given`: the only conversations there are; the target answers in them."""
        self._engine, self._manner, self._given = engine, manner, given
        self._template = Template(engine.tokenizer)
        self._tokens_max = min(manner.tokens_max, engine.context_len)

    async def trained(self, number: int) -> Conversation | None:
        """To learn from. None: it would be too long."""
        chance = random.Random(f"{self._manner.seed}/trained/{number}")
        if self._given is not None:
            return await self._answered(self._given[number], chance, self._temperature(chance))
        shares = self._manner.turn_shares
        turns = 1 + chance.choices(range(len(shares)), shares)[0]
        return await self._held(chance, turns, self._temperature(chance))

    async def held_out(self, number: int) -> Conversation | None:
        """To measure by: one turn, answered greedily; the first are `HELD_OUT`."""
        chance = random.Random(f"{self._manner.seed}/held out/{number}")
        if self._given is not None:
            return await self._answered(self._given[number], chance, 0.0)
        if number < len(HELD_OUT):
            messages = [{"role": "user", "content": HELD_OUT[number]}]
            return await self._answered(messages, chance, 0.0)
        return await self._held(chance, 1, 0.0, question_share=0.0)

    def _temperature(self, chance: random.Random) -> float:
        is_greedy = chance.random() < self._manner.greedy_share
        return 0.0 if is_greedy else chance.choice((0.3, 0.6, 0.8))

    async def _held(
        self,
        chance: random.Random,
        turns: int,
        temperature: float,
        question_share: float | None = None,
    ) -> Conversation | None:
        share = self._manner.question_share if question_share is None else question_share
        messages: Messages = []
        spans: list[tuple[int, list[int], int]] = []  # (where, tokens, writer)
        ids: list[int] = []
        for turn in range(turns):
            if turn or chance.random() >= share:
                text, span = await self._asked(messages, chance)
                spans += span
            else:
                text = question(chance)
            messages.append({"role": "user", "content": text})
            prompt = self._template.answering(messages)
            room = self._tokens_max - len(prompt)
            if room < 2:
                break
            answer = await self._write(
                prompt,
                temperature=temperature,
                max_tokens=min(self._manner.answer_len, room),
                seed=chance.getrandbits(62),
            )
            spans.append((len(prompt), list(answer.token_ids), ANSWER))
            ids = [*prompt, *answer.token_ids]
            if answer.finish_reason != "stop":
                break
            messages.append({"role": "assistant", "content": answer.text})
        return _conversation(ids, spans) if ids else None

    async def _answered(
        self, messages: Messages, chance: random.Random, temperature: float
    ) -> Conversation | None:
        """A given conversation with a last answer: its own, or the target's."""
        if messages[-1]["role"] == "assistant":
            prompt = self._template.answering(messages[:-1])
            whole = self._template.asking(messages)
            answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else []
            ids = [*prompt, *answer][: self._tokens_max]
            return _conversation(ids, [(len(prompt), ids[len(prompt) :], ANSWER)])
        prompt = self._template.answering(messages)
        room = self._tokens_max - len(prompt)
        if room < 2:
            return None
        made = await self._write(
            prompt,
            temperature=temperature,
            max_tokens=min(self._manner.answer_len, room),
            seed=chance.getrandbits(62),
        )
        return _conversation(
            [*prompt, *made.token_ids], [(len(prompt), list(made.token_ids), ANSWER)]
        )

    async def _asked(
        self, messages: Messages, chance: random.Random
    ) -> tuple[str, list[tuple[int, list[int], int]]]:
        """What the target says as the user; one of `prompts` if that is nothing."""
        prompt = self._template.asking(messages)
        for _ in range(ATTEMPTS_MAX):
            said = await self._write(
                prompt,
                temperature=1.0,
                top_k=40,
                max_tokens=self._manner.asked_len,
                seed=chance.getrandbits(62),
            )
            text = said.text.strip()
            if (
                said.finish_reason == "stop"
                and len(text) >= ASKED_CHARS_MIN
                and text not in HELD_OUT
            ):
                return text, [(len(prompt), list(said.token_ids), ASKED)]
        return question(chance), []

    async def _write(self, prompt: list[int], **sampling: Any) -> Completion:
        params = SamplingParams(**sampling)
        generation = await submit_when_room(self._engine, prompt, params, {})
        async with generation:
            return await collect(generation, generation.prompt_token_ids, params)


def _conversation(ids: list[int], spans: list[tuple[int, list[int], int]]) -> Conversation:
    """Spans that a later rendering tokenises in another way count as given."""
    writers = np.full(len(ids), GIVEN, dtype=np.uint8)
    for start, tokens, writer in spans:
        if ids[start : start + len(tokens)] == tokens:
            writers[start : start + len(tokens)] = writer
    return Conversation(np.array(ids, dtype=np.int32), writers)
