"""The engine for plain Python: no async in sight, safe in threads, notebooks and at exit."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Unpack

import trio
from tqdm import tqdm

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine, RequestOptions, open_engine
from aserve.actors.generation import Generation
from aserve.actors.loading import Progress
from aserve.actors.portal import Portal
from aserve.actors.prompt import Prompt
from aserve.core.config import Config
from aserve.core.request import Delta, SamplingParams
from aserve.errors import RequestError

Messages = Sequence[Mapping[str, Any]]
QUEUE_FULL = 429


class LLM:
    """A model in a thread of its own. Use it in a `with`, or call `close`; arguments are those of
    `open_engine`. Its methods block, keep the order of their prompts, and may be called from
    several threads at once."""

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: Config | None = None,
        progress: Progress | None = None,
        **overrides: Any,
    ) -> None:
        opener: Callable[[], AbstractAsyncContextManager[Engine]] = partial(
            open_engine, model, config=config, progress=progress, **overrides
        )
        self._portal: Portal[Engine] = Portal(opener, "aserve-llm")
        self.engine = self._portal.resource
        # Runs when this object is collected, and at exit.
        self._finalizer = weakref.finalize(self, self._portal.close)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort what still runs, free the model, end the thread. May be repeated."""
        self._finalizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """One Completion for each prompt: a text, token ids, or chat messages, or a list of those.

        `params` is one for all or one for each. `progress` shows a bar. Raises RequestError when a
        prompt is refused; none of the others is finished then.
        """
        asked = prompt_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(asked)
        else:
            each = list(params)
        if len(each) != len(asked):
            raise RequestError(f"{len(asked)} prompts but {len(each)} params", param="params")
        with tqdm(total=len(asked), disable=not progress, unit="prompt") as bar:
            job = partial(generate_all, self.engine, asked, each, bar.update, options)
            return self._portal.call(job)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Completion]:
        """As `generate`, of one conversation or a list of them, through the chat template."""
        return self.generate(messages, params, progress=progress, **options)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Delta]:
        """Deltas as they come. Leaving the loop early aborts the request."""
        submit = partial(submit_when_room, self.engine, prompt, params, options)
        generation = self._portal.call(submit)
        try:
            while (delta := self._portal.call(next_delta, generation)) is not None:
                yield delta
        finally:
            # Nothing to wait for, and the collector may run this in the portal's own thread.
            self._portal.post(generation.abort)

    def tokenize(self, text: str) -> list[int]:
        """Token ids as a prompt of this text would have them."""
        ids: list[int] = self.engine.tokenizer.encode(text)
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        text: str = self.engine.tokenizer.decode(list(ids))
        return text


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of them: a list of strings or of lists is a list of prompts."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(part, int | Mapping) for part in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


async def next_delta(generation: Generation) -> Delta | None:
    async for delta in generation:
        return delta
    return None


async def submit_when_room(
    engine: Engine, prompt: Prompt, params: SamplingParams | None, options: RequestOptions
) -> Generation:
    """Submit; while the queue is full, wait for it to move."""
    await engine.check(params or SamplingParams())
    while True:
        try:
            return engine.submit(prompt, params, **options)
        except RequestError as error:
            if error.status != QUEUE_FULL:
                raise
        await engine.wait_progress()


async def generate_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    finished: Callable[[int], object],
    options: RequestOptions,
) -> list[Completion]:
    """Submit in order as the queue has room, collect as they end; the result is in order."""
    completions: dict[int, Completion] = {}
    refusal: RequestError | None = None

    async def collect_one(place: int, generation: Generation) -> None:
        async with generation:
            completions[place] = await collect(
                generation, generation.prompt_token_ids, params[place]
            )
        finished(1)

    async with trio.open_nursery() as nursery:
        for place, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
            try:
                generation = await submit_when_room(engine, prompt, chosen, options)
            except RequestError as error:
                refusal = error
                nursery.cancel_scope.cancel()
                break
            nursery.start_soon(collect_one, place, generation)
    if refusal is not None:
        raise refusal
    return [completions[place] for place in range(len(prompts))]
