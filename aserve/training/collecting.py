"""Fills a folder with conversations, many streams at once; going on where it was interrupted."""

import dataclasses
import itertools
import pathlib
from collections.abc import Awaitable, Callable, Iterator

import numpy as np
import trio

from aserve.training.files import (
    Conversation,
    load_conversations,
    load_numbered,
    save_conversations,
)

FILE_CONVERSATIONS = 64
SAVED_EACH = 16  # conversations whose file is not whole yet
WAITING = "waiting.safetensors"
NONE = Conversation(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint8))
Write = Callable[[int], Awaitable[Conversation | None]]
Told = Callable[[int], object]  # tokens so far


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """Enough is `tokens` (as many whole files as that takes), or all of `conversations`."""

    tokens: int
    conversations: int | None
    streams: int
    per_file: int = FILE_CONVERSATIONS


def token_file(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"{number:05}.safetensors"


def collected(folder: pathlib.Path, goal: Goal) -> list[pathlib.Path] | None:
    """The files that make up the goal; None: it is not reached. Further ones are left out, so that
    what is trained on does not depend on how far a run got before it was interrupted."""
    found: list[pathlib.Path] = []
    tokens = 0
    for number in _file_numbers(goal):
        path = token_file(folder, number)
        if tokens >= goal.tokens:
            break
        if not path.is_file():
            return None
        tokens += sum(len(one) for one in load_conversations(path))
        found.append(path)
    return found


def _file_numbers(goal: Goal) -> Iterator[int]:
    if goal.conversations is None:
        yield from itertools.count()
    else:
        yield from range(-(-goal.conversations // goal.per_file))


class Collector:
    def __init__(self, folder: pathlib.Path, goal: Goal, write: Write, told: Told) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._goal, self._write, self._told = folder, goal, write, told
        self._waiting: dict[int, dict[int, Conversation]] = {}
        self._saved = self._left()
        self._unsaved = 0
        self._tokens: dict[int, int] = {}  # of each whole file
        self._open_tokens = 0  # of conversations in none yet
        self._numbers = self._missing()

    def _left(self) -> dict[int, Conversation]:
        """By an earlier run, of files that are not whole."""
        path, per_file = self._folder / WAITING, self._goal.per_file
        left = load_numbered(path) if path.is_file() else {}
        return {
            number: one
            for number, one in left.items()
            if not token_file(self._folder, number // per_file).is_file()
        }

    async def run(self) -> list[pathlib.Path]:
        """Write until the goal is reached; the files that make it up."""
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(self._goal.streams):
                    nursery.start_soon(self._stream, nursery.cancel_scope)
        finally:
            self._save_waiting()
        files = collected(self._folder, self._goal)
        assert files is not None
        return files

    async def _stream(self, all_of_them: trio.CancelScope) -> None:
        for number in self._numbers:
            if number not in self._saved:
                self._keep(number, await self._write(number) or NONE)
            else:
                self._keep(number, self._saved.pop(number))
            if self._is_enough():
                all_of_them.cancel()
                return

    def _missing(self) -> Iterator[int]:
        """Numbers of conversations in no file, in order."""
        goal = self._goal
        for file in _file_numbers(goal):
            path = token_file(self._folder, file)
            if path.is_file():
                self._tokens[file] = sum(len(one) for one in load_conversations(path))
                self._told(self._n_tokens())
                continue
            if self._is_enough():
                return
            self._waiting[file] = {}
            yield from self._in_file(file)

    def _in_file(self, file: int) -> range:
        goal, start = self._goal, file * self._goal.per_file
        stop = start + goal.per_file
        return range(start, stop if goal.conversations is None else min(stop, goal.conversations))

    def _keep(self, number: int, conversation: Conversation) -> None:
        """An empty one could not be had."""
        file = number // self._goal.per_file
        waiting = self._waiting[file]
        waiting[number] = conversation
        self._open_tokens += len(conversation)
        self._unsaved += 1
        if len(waiting) == len(self._in_file(file)):
            whole = [one for _, one in sorted(waiting.items()) if len(one)]
            save_conversations(token_file(self._folder, file), whole)
            del self._waiting[file]
            self._tokens[file] = sum(map(len, whole))
            self._open_tokens -= self._tokens[file]
        if self._unsaved >= SAVED_EACH:
            self._save_waiting()
        self._told(self._n_tokens())

    def _save_waiting(self) -> None:
        """So that what was written is not written again; those that nobody took up yet, too."""
        waiting = {n: one for file in self._waiting.values() for n, one in file.items()}
        waiting |= self._saved
        save_conversations(self._folder / WAITING, list(waiting.values()), list(waiting))
        self._unsaved = 0

    def _n_tokens(self) -> int:
        return sum(self._tokens.values()) + self._open_tokens

    def _is_enough(self) -> bool:
        """Whether the files from the first one on, without a gap, hold enough."""
        tokens = 0
        for file in itertools.count():
            if file not in self._tokens:
                return False
            tokens += self._tokens[file]
            if tokens >= self._goal.tokens:
                return True
        raise AssertionError("count has no end")
