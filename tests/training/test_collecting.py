"""Conversations into files: the same ones whatever the order, the streams and the interruptions."""

import pathlib
import random

import numpy as np
import pytest
import safetensors.numpy
import trio
import trio.testing

from aserve.errors import ConfigError, ModelError
from aserve.training.collecting import Collector, Goal, collected, token_file
from aserve.training.files import (
    Conversation,
    load_conversations,
    read_questions,
    save_conversations,
)


def conversation(number: int) -> Conversation | None:
    length = number % 7 + 2
    if length == 4:
        return None
    tokens = np.arange(length, dtype=np.int32) + 100 * number
    return Conversation(tokens, np.full(length, 2, dtype=np.uint8))


class Slow:
    """Takes as long over a conversation as chance has it; counts those it wrote."""

    def __init__(self, seed: int) -> None:
        self.chance, self.written = random.Random(seed), 0

    async def write(self, number: int) -> Conversation | None:
        await trio.sleep(self.chance.random())
        self.written += 1
        return conversation(number)


def content(files: list[pathlib.Path]) -> list[list[int]]:
    return [one.tokens.tolist() for path in files for one in load_conversations(path)]


def token_files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("0*.safetensors"))


def names(folder: pathlib.Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


GOAL = Goal(tokens=60, conversations=None, streams=5, per_file=4)


async def test_order_and_streams_do_not_matter(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    found = []
    for seed, streams in enumerate((1, 3, 11)):
        goal = Goal(60, None, streams, per_file=4)
        folder, slow = tmp_path / str(seed), Slow(seed)
        found.append(content(await Collector(folder, goal, slow.write, lambda n: None).run()))
    assert found[0] == found[1] == found[2]
    assert sum(map(len, found[0])) >= 60
    wanted = [conversation(n) for n in range(100)]
    assert found[0] == [c.tokens.tolist() for c in wanted if c is not None][: len(found[0])]


async def test_an_interrupted_run_goes_on_from_whole_files(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    slow = Slow(1)
    with trio.move_on_after(1.0):
        await Collector(tmp_path, GOAL, slow.write, lambda n: None).run()
    assert collected(tmp_path, GOAL) is None
    kept, first = names(tmp_path), slow.written
    assert kept
    again, told = Slow(2), list[int]()
    files = await Collector(tmp_path, GOAL, again.write, told.append).run()
    assert kept <= names(tmp_path)
    assert content(files) == content(
        await Collector(tmp_path / "whole", GOAL, Slow(3).write, lambda n: None).run()
    )
    assert told == sorted(told)
    # Nothing is written twice but what was being written when it was interrupted.
    assert first + again.written <= 4 * len(token_files(tmp_path)) + 2 * GOAL.streams
    last = Slow(4)
    assert await Collector(tmp_path, GOAL, last.write, lambda n: None).run() == files
    assert last.written == 0


async def test_a_given_number_of_conversations_ends_it(
    tmp_path: pathlib.Path, autojump_clock: trio.testing.MockClock
) -> None:
    goal = Goal(1 << 62, 10, 4, per_file=4)
    slow = Slow(0)
    files = await Collector(tmp_path, goal, slow.write, lambda n: None).run()
    assert (len(files), slow.written) == (3, 10)
    assert collected(tmp_path, goal) == files


def test_files_without_a_conversation_are_files(tmp_path: pathlib.Path) -> None:
    path = token_file(tmp_path, 3)
    save_conversations(path, [])
    assert load_conversations(path) == []


def test_a_damaged_file_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "00000.safetensors"
    path.write_bytes(b"12345678")
    with pytest.raises(ModelError, match=r"00000\.safetensors holds no conversations, or is cut"):
        load_conversations(path)
    parts = {"tokens": np.zeros(3, np.int32), "writers": np.zeros(3, np.uint8)}
    safetensors.numpy.save_file(parts, path)
    with pytest.raises(ModelError, match="it lacks lengths"):
        load_conversations(path)
    parts["lengths"] = np.array([1, 1], np.int32)
    safetensors.numpy.save_file(parts, path)
    with pytest.raises(ModelError, match="its parts differ in length"):
        load_conversations(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 2 is not JSON"),
        ("[1, 2]", "line 2 is no"),
        ('{"text": "hello"}', "line 2 is no"),
        ('{"prompt": "  "}', "line 2 is no"),
        ('{"messages": []}', "line 2 is no"),
        ('{"messages": [{"role": "user"}]}', "line 2 is no"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 2 is no"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "line 2 has no message of the user"),
    ],
)
def test_a_line_of_another_shape_is_named(line: str, said: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "hello"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=said):
        read_questions(str(path))


def test_a_file_that_is_not_there_or_too_short_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(str(tmp_path / "none.jsonl"))
    (tmp_path / "one.jsonl").write_text('{"prompt": "hello"}\n\n')
    with pytest.raises(ConfigError, match="has 1 conversations"):
        read_questions(str(tmp_path / "one.jsonl"))
