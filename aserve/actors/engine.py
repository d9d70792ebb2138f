"""The engine: a model that answers requests, held in an `async with` under trio."""

import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypedDict, Unpack

import msgspec
import trio

from aserve.actors.choice import Choice
from aserve.actors.debug import DebugState, debug_state
from aserve.actors.generation import Generation, Stream
from aserve.actors.loading import Progress
from aserve.actors.metrics import EngineStatistics
from aserve.actors.placement import Known, Placement
from aserve.actors.places import open_placement
from aserve.actors.prompt import Prompt, PromptReader
from aserve.actors.sampling import sampling_of
from aserve.actors.supervision import State
from aserve.actors.supervisor import Supervisor
from aserve.actors.validate import (
    Facts,
    check_params,
    check_priority,
    check_prompt,
    check_salt,
    refused,
)
from aserve.core.config import Config
from aserve.core.features import explain
from aserve.core.message import Grammar, Sampling
from aserve.core.noise import seed_of_choice
from aserve.core.request import Request, SamplingParams, StructuredOutput
from aserve.core.settings import merge
from aserve.errors import ConfigError, RequestError
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer
from aserve.wire.nursery import ServiceNursery

GRAMMARS_MAX = 256
STATES_S = 1.0


class RequestOptions(TypedDict, total=False):
    """What a request may say besides its prompt and its sampling.

    Lower `priority` goes first. Cached prefixes are shared only under one `cache_salt`. `tools` and
    `chat_template_kwargs` go to the template of chat messages.
    """

    priority: int
    cache_salt: str
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class Ask(msgspec.Struct, frozen=True):
    """A request that has passed every check."""

    tokens: tuple[int, ...]
    max_tokens: int
    params: SamplingParams
    seed: int
    grammar: Grammar | None
    priority: int
    cache_salt: str


class Engine:
    """Made by `open_engine`. Submitting is synchronous; what comes back is awaited."""

    def __init__(self, config: Config, known: Known, supervisor: Supervisor) -> None:
        self.config = config
        self.model_name = known.name
        self.context_len = known.context_len
        self.vocab_size = known.vocab_size
        self.tokenizer: Tokenizer = known.tokenizer
        self.created = int(time.time())
        # More choices than the queue can hold would be told to try again for ever.
        n_max = min(config.limits.n_max, config.schedule.waiting_max)
        limits = msgspec.structs.replace(config.limits, n_max=n_max)
        self._facts = Facts(self.context_len, self.vocab_size, limits)
        self._reader = PromptReader(self.tokenizer, self._facts)
        self._supervisor = supervisor
        self._leader = supervisor.leader
        self._compilers = trio.CapacityLimiter(2)
        self._grammars: dict[bytes, Grammar] = {}  # checked, by their JSON
        self._seqs = itertools.count(1)
        self._requests: dict[str, tuple[int, ...]] = {}
        self._draining = False

    @property
    def ready(self) -> bool:
        """Requests are being answered: every rank serves, and no shutdown has begun."""
        return self._supervisor.state is State.SERVING and not self._draining

    def on_delivered(self, call: Callable[[], None]) -> None:
        """`call` behind the last delta of every step: what a `Shortcut` took may go out now."""
        self._leader.delivered = call

    @property
    def state(self) -> State:
        """Of the ranks. Requests are taken while they are restarted too, and wait."""
        return self._supervisor.state

    @property
    def failure(self) -> str | None:
        """What ended the ranks for good, if something did."""
        return self._leader.failure

    @property
    def last_break(self) -> str | None:
        """Why the ranks were last started anew."""
        return self._supervisor.reason

    async def check(self, params: SamplingParams) -> None:
        """`submit`'s checks of `params`, the slow one (its grammar) in another thread.

        Raises RequestError. Not required before `submit`, which then does them itself.
        """
        check_params(params, self._facts)
        await trio.lowlevel.checkpoint()
        structured = params.structured_outputs
        if structured is None:
            return
        limit_s = self.config.limits.grammar_compile_s
        with trio.move_on_after(limit_s):
            checked = await trio.to_thread.run_sync(
                self._compiled, structured, abandon_on_cancel=True, limiter=self._compilers
            )
            self._remember(structured, checked)
            return
        raise refused("structured_outputs", f"took longer than {limit_s:g} s to compile")

    def _compiled(self, structured: StructuredOutput) -> Grammar:
        """Checked, and left where the rank's own compiling finds it."""
        checked = grammar.check(structured, self.config.limits)
        grammar.compile(checked, self.tokenizer, self.vocab_size)
        return checked

    def _remember(self, structured: StructuredOutput, checked: Grammar) -> None:
        if len(self._grammars) >= GRAMMARS_MAX:
            self._grammars.pop(next(iter(self._grammars)))
        self._grammars[msgspec.json.encode(structured)] = checked

    def _grammar(self, structured: StructuredOutput | None) -> Grammar | None:
        if structured is None:
            return None
        try:
            found = self._grammars.get(msgspec.json.encode(structured))
        except (TypeError, ValueError, OverflowError, RecursionError):
            found = None  # not JSON: checking it says what is wrong
        if found is None:
            found = grammar.check(structured, self.config.limits)
            self._remember(structured, found)
        return found

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Queue a request: text, token ids, or chat messages (with `tools` for their template).

        Raises RequestError: 400 with the `param` at fault, 429 when the queue is full, 503 when
        the engine is closing or broken.
        """
        self._check_open()
        params = SamplingParams() if params is None else params
        request_id = request_id or f"gen-{secrets.token_hex(12)}"
        if request_id in self._requests:
            raise refused("request_id", f"{request_id!r} is of a request still running")
        ask = self._read(prompt, params, options)
        stream = Stream(params.n)
        sampling = sampling_of(params, self.tokenizer, ask.seed, ask.grammar)
        choices = [self._choice(ask, sampling, stream, index) for index in range(params.n)]
        head = self._echoed(prompt, ask)
        for _, choice in choices:
            choice.head = head
        seqs = tuple(request.seq for request, _ in choices)
        self._leader.add(choices)
        self._requests[request_id] = seqs
        stream.on_over = partial(self._requests.pop, request_id, None)
        return Generation(request_id, ask.tokens, stream, partial(self._leader.abort, seqs))

    generate = submit

    def _check_open(self) -> None:
        trio.lowlevel.current_trio_token()  # raises in a thread that is not the engine's
        if self._leader.failure is not None:
            raise RequestError(f"The engine is broken: {self._leader.failure}", status=503)
        if self._draining:
            raise RequestError("The engine is shutting down.", status=503, retry_after_s=10)

    def _read(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Ask:
        for name in options:
            if name not in RequestOptions.__annotations__:
                raise refused(name, "is no option of a request (sampling goes into params)")
        check_params(params, self._facts)
        tokens = self._reader.tokens(
            prompt,
            tools=options.get("tools"),
            template_kwargs=options.get("chat_template_kwargs"),
        )
        max_tokens = check_prompt(tokens, params, self._facts)
        if params.max_tokens is None:  # as long as may be: of the context, and of the KV pool
            room = self._leader.planner.request_len_max - len(tokens)
            max_tokens = max(1, params.min_tokens, min(max_tokens, room))
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Ask(
            tokens=tokens,
            max_tokens=max_tokens,
            params=params,
            seed=seed,
            grammar=self._grammar(params.structured_outputs),
            priority=check_priority(options.get("priority", 0)),
            cache_salt=check_salt(options.get("cache_salt", "")),
        )

    def _choice(
        self, ask: Ask, sampling: Sampling, stream: Stream, index: int
    ) -> tuple[Request, Choice]:
        seq = next(self._seqs)
        sampling = msgspec.structs.replace(sampling, seed=seed_of_choice(ask.seed, index))
        request = Request(seq, ask.tokens, ask.max_tokens, sampling, ask.priority, ask.cache_salt)
        return request, Choice(seq, index, stream, ask.tokens, ask.params, self.tokenizer)

    def _echoed(self, prompt: Prompt, ask: Ask) -> str:
        """The prompt's text, as it was given if it was text."""
        if not ask.params.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        skip = ask.params.skip_special_tokens
        return self.tokenizer.decode(ask.tokens, skip_special=skip)

    def abort(self, request_id: str) -> bool:
        """End a request; its choices finish with "abort". False if no such request runs."""
        return self._leader.abort(self._requests.get(request_id, ()))

    def flush_cache(self) -> bool:
        """Forget every cached prefix that no running request uses."""
        flushed: bool = self._leader.planner.flush_cache()
        self._leader.wake()
        return flushed

    def statistics(self) -> EngineStatistics:
        return self._leader.meters.statistics(
            self._leader.planner.statistics(),
            ready=self.ready,
            state=self.state,
            failure=self.failure,
            restarts=self._supervisor.restarts,
        )

    async def debug_state(self, limit_s: float = STATES_S) -> DebugState:
        """What every rank, queue and page is at; who does not answer within the limit is named."""
        return await debug_state(self._supervisor, self.config, limit_s)

    def close(self) -> None:
        """End every request with "abort" and take no more; `open_engine` calls it on leaving."""
        self._draining = True
        self._supervisor.close()

    async def wait_progress(self) -> None:
        """Return when a step was computed or a request ended: the queue may have room now."""
        await self._leader.wait_progress()

    async def drain(self, limit_s: float) -> None:
        """Take no more requests, let those running end for up to `limit_s`, abort the rest."""
        self._draining = True
        with trio.move_on_after(limit_s):
            while self._leader.busy:
                await self._leader.wait_progress()
        for request_id in list(self._requests):
            self.abort(request_id)


@asynccontextmanager
async def open_engine(
    model: str | os.PathLike[str] | None = None,
    *,
    config: Config | None = None,
    progress: Progress | None = None,
    **overrides: Any,
) -> AsyncIterator[Engine]:
    """Load a model and serve it until the block ends.

    `model` is `smollm2`, a folder, a `.gguf` file or a hub name. Any value of the configuration
    may be overridden by its dotted name, with `__` for the dot (`cache__page_size=32`).
    `progress(done, total, what)` is called from another thread while the model loads. Raises
    ConfigError (ModelError for the model's own faults). Leaving the block aborts what still runs.
    """
    config = settled(model, config, overrides)
    async with (
        open_placement(config, progress) as placement,
        run_engine(config, placement, progress) as engine,
    ):
        yield engine


@asynccontextmanager
async def run_engine(
    config: Config, placement: Placement, progress: Progress | None = None
) -> AsyncIterator[Engine]:
    """The engine over ranks that live in `placement`."""
    async with ServiceNursery() as nursery:
        supervisor = Supervisor(config, placement)
        await nursery.start(supervisor.run)
        engine = Engine(config, placement.known, supervisor)
        try:
            if progress is not None and supervisor.leader.planner.profiling:
                progress(0, 0, "measuring how long chunks of a prompt take")
            await supervisor.leader.wait_profiled()
            yield engine
        finally:
            engine.close()
            await supervisor.dismiss()


def settled(
    model: str | os.PathLike[str] | None, config: Config | None, overrides: Mapping[str, Any]
) -> Config:
    """One configuration out of all that was given. Raises ConfigError with every finding."""
    table: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}
    for name, value in overrides.items():
        key = name.replace("__", ".")
        section, _, field = key.partition(".")
        if isinstance(value, str) or not field:
            texts[key] = str(value)
        else:
            table.setdefault(section, {})[field] = value
    if model is not None:
        texts["model.path"] = os.fspath(model)
    settled = merge(config or Config(), table, texts)
    if findings := explain(settled):
        raise ConfigError(str(finding) for finding in findings)
    return settled
