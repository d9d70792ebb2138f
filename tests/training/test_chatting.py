"""Conversations of a tiny model with itself, through a real engine."""

import pathlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

import aserve
from aserve.actors.completion import Completion, CompletionChoice
from aserve.actors.engine import Engine
from aserve.core.request import Usage
from aserve.errors import ConfigError
from aserve.text.tokenizer import load_tokenizer
from aserve.training.chatting import Author, Manner, Template
from aserve.training.files import ANSWER, ASKED, GIVEN
from aserve.training.prompts import HELD_OUT, TEMPLATES, WORDS, question

MANNER = Manner(asked_len=12, answer_len=10, tokens_max=200)
pytestmark = pytest.mark.slow


async def talked(path: pathlib.Path, manner: Manner, numbers: list[int]) -> list[tuple[str, str]]:
    """(text, who wrote what) of conversations."""
    async with aserve.open_engine(path, cache__kv_mib_max=16, compute__threads=1) as engine:
        author = Author(engine, manner)
        return [shown(engine, await author.trained(number)) for number in numbers]


def shown(engine: Engine, conversation: object) -> tuple[str, str]:
    tokens, writers = conversation.tokens.tolist(), conversation.writers.tolist()  # type: ignore[attr-defined]
    return engine.tokenizer.decode(tokens), "".join(map(str, writers))


async def test_a_conversation_follows_from_its_number(tiny_model_path: pathlib.Path) -> None:
    forth = await talked(tiny_model_path, MANNER, [0, 1, 2, 3])
    back = await talked(tiny_model_path, MANNER, [3, 2, 1, 0])
    assert forth == back[::-1]
    assert len(set(forth)) == 4


async def test_answers_are_marked_and_their_end_with_them(tiny_model_path: pathlib.Path) -> None:
    manner = Manner(answer_len=10, question_share=1.0, turn_shares=(1.0,))
    for text, writers in await talked(tiny_model_path, manner, list(range(6))):
        assert text.startswith("<|im_start|>user\n")
        assert text.count("<|im_start|>assistant\n") == 1
        assert set(writers) == {str(GIVEN), str(ANSWER)}
        answer = writers.lstrip(str(GIVEN))
        assert set(answer) == {str(ANSWER)}
        assert len(answer) == 10 or text.endswith("<|im_end|>")


class Scripted(Author):
    """Says what it is told to, one after the other."""

    def __init__(self, path: pathlib.Path, manner: Manner, texts: list[str]) -> None:
        tokenizer = load_tokenizer(path)
        super().__init__(SimpleNamespace(tokenizer=tokenizer, context_len=512), manner)  # type: ignore[arg-type]
        self.tokenizer, self.texts = tokenizer, texts

    async def _write(self, prompt: list[int], **sampling: Any) -> Completion:
        text = self.texts.pop(0)
        ids = tuple(self.tokenizer.encode(text + "<|im_end|>", False))
        usage = Usage(len(prompt), len(ids), 0)
        choice = CompletionChoice(0, text, ids, "stop", None, None, None, usage, None)
        return Completion(tuple(prompt), (choice,))


async def test_who_wrote_what_is_known_over_several_turns(tiny_model_path: pathlib.Path) -> None:
    said = ["What of the dog?", "It jumps.", "x", "And what of the fox?", "It is lazy."]
    manner = Manner(question_share=0.0, turn_shares=(0.0, 1.0))
    author = Scripted(tiny_model_path, manner, said.copy())
    found = await author.trained(0)
    assert found is not None
    assert author.texts == []
    for text, writer in zip(said, (ASKED, ANSWER, None, ASKED, ANSWER), strict=True):
        if writer is None:  # too short a question: it had to ask again
            continue
        ids = author.tokenizer.encode(text + "<|im_end|>", False)
        at = next(n for n in range(len(found)) if found.tokens[n : n + len(ids)].tolist() == ids)
        assert set(found.writers[at : at + len(ids)].tolist()) == {writer}
        assert found.writers[at - 1] == GIVEN
    assert author.tokenizer.decode(found.tokens.tolist()).count("<|im_start|>user") == 2


async def test_given_conversations_are_answered_or_learnt_as_they_stand(
    tiny_model_path: pathlib.Path,
) -> None:
    asked = {"role": "user", "content": "The dog?"}
    told = {"role": "assistant", "content": "The fox."}
    async with aserve.open_engine(tiny_model_path, cache__kv_mib_max=16) as engine:
        author = Author(engine, MANNER, [[asked], [asked, told], [asked, told, asked]])
        texts = [shown(engine, await author.trained(number)) for number in range(3)]
        long = [[{"role": "user", "content": "word " * 400}]]
        assert await Author(engine, MANNER, long).trained(0) is None
    head = "<|im_start|>user\nThe dog?<|im_end|>\n<|im_start|>assistant\n"
    assert texts[0][0].startswith(head)
    assert texts[0][1].endswith(str(ANSWER))
    assert texts[1][0].startswith(head + "The fox.<|im_end|>")
    assert texts[1][1].lstrip(str(GIVEN)).startswith(str(ANSWER))
    assert texts[2][0].startswith(head + "The fox.<|im_end|>\n" + head)


async def test_held_out_questions_are_answered_greedily(tiny_model_path: pathlib.Path) -> None:
    async with aserve.open_engine(tiny_model_path, cache__kv_mib_max=16) as engine:
        ours = [await Author(engine, MANNER).held_out(3) for _ in range(2)]
        other = await Author(engine, Manner(seed=9, answer_len=10)).held_out(3)
    texts = [shown(engine, one) for one in (*ours, other)]
    assert texts[0] == texts[1] == texts[2]
    assert HELD_OUT[3] in texts[0][0]


def test_a_model_without_a_chat_template_is_refused(tiny_model_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(tiny_model_path)
    template = Template(tokenizer)
    user = {"role": "user", "content": "hi"}
    whole, before = template.answering([user]), template.asking([])
    assert whole[: len(before)] == before
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"no chat template.*--model\.chat_template FILE"):
        Template(tokenizer)
    tokenizer.chat_template = "{{ 'the same for all' }}"
    with pytest.raises(ConfigError, match="does not show what the user says"):
        Template(tokenizer)


def test_questions_are_many_and_follow_from_chance() -> None:
    asked = [question(random.Random(n)) for n in range(3000)]
    assert asked == [question(random.Random(n)) for n in range(3000)]
    assert len(set(asked)) > 2700
    assert not any("{" in one or "}" in one for one in asked)
    assert not set(asked) & set(HELD_OUT)
    for word in WORDS.values():
        assert len(set(word)) == len(word)
    assert len(set(TEMPLATES)) == len(TEMPLATES)
