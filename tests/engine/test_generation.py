"""The mailbox between leader and consumer: order, merging, ends."""

import gc

import pytest
import trio
import trio.testing

from aserve.actors.generation import Ending, Generation, Stream
from aserve.core.message import TokenLogprob
from aserve.core.request import Delta, Usage


def say(stream: Stream, index: int, text: str, token: int) -> None:
    pending = stream.pending(index)
    pending.text.append(text)
    pending.token_ids.append(token)
    pending.logprobs.append(TokenLogprob(token, -1.0, ()))
    stream.publish(ended=False)


def end(stream: Stream, index: int) -> None:
    stream.pending(index).ending = Ending("stop", Usage(1, 2, 0), "x")
    stream.publish(ended=True)


async def test_untaken_deltas_of_a_choice_become_one() -> None:
    stream = Stream(1)
    say(stream, 0, "a", 1)
    say(stream, 0, "b", 2)
    end(stream, 0)
    delta = await stream.wait_delta()
    assert delta is not None
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ab", (1, 2), "stop")
    assert delta.stop_reason == "x"
    assert delta.usage == Usage(1, 2, 0)
    assert len(delta.logprobs) == 2
    assert await stream.wait_delta() is None
    assert await stream.wait_delta() is None


async def test_choices_take_turns_in_the_order_of_their_news() -> None:
    stream = Stream(2)
    say(stream, 1, "b", 1)
    say(stream, 0, "a", 2)
    say(stream, 1, "c", 3)
    first, second = await stream.wait_delta(), await stream.wait_delta()
    assert first is not None
    assert second is not None
    assert [(first.index, first.text), (second.index, second.text)] == [(1, "bc"), (0, "a")]


async def test_a_waiting_consumer_is_woken_by_news_and_by_the_end() -> None:
    stream = Stream(1)
    taken: list[str] = []

    async def consume() -> None:
        async for delta in Generation("r", (1,), stream, lambda: None):
            taken.append(delta.text)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        say(stream, 0, "a", 1)
        await trio.testing.wait_all_tasks_blocked()
        assert taken == ["a"]
        end(stream, 0)
    assert taken == ["a", ""]


async def test_the_last_end_tells_the_owner_once() -> None:
    stream = Stream(2)
    told: list[int] = []
    stream.on_over = lambda: told.append(1)
    end(stream, 1)
    assert told == []
    end(stream, 0)
    assert told == [1]


async def test_dropping_a_running_generation_aborts_it_and_a_finished_one_does_not() -> None:
    aborted: list[str] = []
    running, finished = Stream(1), Stream(1)
    end(finished, 0)
    generations = [
        Generation("running", (1,), running, lambda: aborted.append("running")),
        Generation("finished", (1,), finished, lambda: aborted.append("finished")),
    ]
    generations.clear()
    gc.collect()
    await trio.testing.wait_all_tasks_blocked()
    assert aborted == ["running"]


async def test_leaving_the_block_aborts() -> None:
    aborted: list[int] = []
    stream = Stream(1)
    stream_over = Generation("r", (1,), stream, lambda: aborted.append(1))
    async with stream_over:
        assert aborted == []
    assert aborted == [1]
    end(stream, 0)


class Taker:
    """A shortcut that takes deltas while it is told to."""

    def __init__(self) -> None:
        self.is_ready = True
        self.texts: list[str] = []

    def ready(self) -> bool:
        return self.is_ready

    def push(self, delta: Delta) -> None:
        if delta.text == "bad":
            raise ValueError(delta.text)
        self.texts.append(delta.text)


async def taken_by(stream: Stream, texts: list[str]) -> None:
    while (delta := await stream.wait_delta()) is not None:
        texts.append(delta.text)


async def test_a_shortcut_takes_what_a_waiting_consumer_would_be_woken_for() -> None:
    stream, taker, texts = Stream(1), Taker(), list[str]()
    stream.shortcut = taker
    stream.put(0, "nobody waits yet", (1,), ())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(taken_by, stream, texts)
        await trio.testing.wait_all_tasks_blocked()
        stream.put(0, "a", (2,), ())
        stream.put(0, "b", (3,), ())
        taker.is_ready = False
        stream.put(0, "c", (4,), ())
        taker.is_ready = True
        stream.put(0, "d", (5,), ())  # behind the one that is not taken yet
        await trio.testing.wait_all_tasks_blocked()
        stream.put(0, "e", (6,), ())
        end(stream, 0)
    assert taker.texts == ["a", "b", "e"]
    assert texts == ["nobody waits yet", "cd", ""]


async def test_what_a_shortcut_raises_reaches_the_consumer_and_not_the_leader() -> None:
    stream = Stream(1)
    stream.shortcut = Taker()
    caught: list[ValueError] = []

    async def consume() -> None:
        try:
            await stream.wait_delta()
        except ValueError as error:
            caught.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(consume)
        await trio.testing.wait_all_tasks_blocked()
        stream.put(0, "bad", (1,), ())
    assert [str(error) for error in caught] == ["bad"]


async def test_one_task_at_a_time_waits_for_deltas() -> None:
    stream = Stream(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stream.wait_delta)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await stream.wait_delta()
        nursery.cancel_scope.cancel()
    stream.put(0, "a", (1,), ())  # nobody waits any more
    delta = await stream.wait_delta()
    assert delta is not None
    assert delta.text == "a"
