"""The course of every generating request: read, prepare, submit, write as the engine speaks."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import trio
from starlette.types import Receive, Scope, Send

from aserve.actors.generation import Generation
from aserve.api.body import read_json
from aserve.api.call import Call
from aserve.api.chunks import DONE, UsageTally, failure_of
from aserve.api.connection import CHUNKS, Chunks
from aserve.api.edge import send_json
from aserve.api.protocol import FIELDS, Generate
from aserve.api.service import Service
from aserve.core.request import Delta, SamplingParams
from aserve.errors import RequestError

logger = logging.getLogger("aserve.http")

R = TypeVar("R", bound=Generate)
START: dict[str, Any] = {"type": "http.response.start", "status": 200}
EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold chunks back
]


class Writer(Protocol):
    """Turns deltas into the bytes of a response: chunks as they come, or one answer at the end."""

    def push(self, prompt: int, delta: Delta) -> bytes:
        """What to send now; empty if nothing."""
        ...

    def end(self, tally: UsageTally) -> bytes:
        """The last chunk (may be empty), or the whole answer."""
        ...


class Job(msgspec.Struct):
    """A request understood: prompts as token ids, and who writes the response."""

    id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    writer: Writer


class GenerateEndpoint(Generic[R]):
    """One route; `prepare` is all that distinguishes chat from completions."""

    def __init__(
        self,
        service: Service,
        decoder: "msgspec.json.Decoder[R]",
        prepare: Callable[[Service, R, Call], Awaitable[Job]],
    ) -> None:
        self._service = service
        self._decoder = decoder
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        config = self._service.config
        call: Call = scope["call"]
        self._service.check_open()
        bodies = self._service.bodies
        request, body = await read_json(scope, receive, self._decoder, bodies)
        call.body_len = len(body)
        if logger.isEnabledFor(logging.DEBUG):
            _log_ignored(call, type(request), body)
        run = _Run(self._service, call, send if request.stream else None)
        run.chunks = scope["extensions"].get(CHUNKS)
        async with call.watched(receive, config.server.request_s):
            job = await self._prepare(self._service, request, call)
            _check_count(job, config.schedule.waiting_max)
            await self._service.engine.check(job.params)
            await run.consume_all(job, request)
        last = job.writer.end(run.tally)
        if request.stream:
            await run.start()  # a request for nothing but its end has not started yet
            message = {"type": "http.response.body", "body": last + DONE, "more_body": False}
            await send(message)
        else:
            await send_json(send, last)


def _check_count(job: Job, count_max: int) -> None:
    """400 for more sequences at once than ever fit the queue, where 429 would say: try again."""
    count = len(job.prompts) * job.params.n
    if count > count_max:
        raise RequestError(
            f"The request asks for {count} sequences; this server queues at most {count_max}.",
            param="n",
        )


def _log_ignored(call: Call, kind: type[Generate], body: bytes) -> None:
    names = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if ignored := sorted(names.keys() - FIELDS[kind]):
        fields = {"request_id": call.request_id, "ignored": " ".join(ignored)}
        logger.debug("unknown fields", extra={"fields": fields})


class _Shortcut:
    """From the leader's task to the socket: what a chunk costs is its JSON and one system call."""

    def __init__(self, prompt: int, writer: Writer, chunks: Chunks) -> None:
        self._prompt = prompt
        self._writer = writer
        self._chunks = chunks
        self.ready = chunks.ready

    def push(self, delta: Delta) -> None:
        data = self._writer.push(self._prompt, delta)
        if data:
            self._chunks.write(data)


class _Run:
    """The generations of one request, and the response they are written to."""

    def __init__(self, service: Service, call: Call, send: Send | None) -> None:
        self._service = service
        self._call = call
        self._send = send
        self._started = False
        self._alone = True
        self._turn = trio.Lock()  # between several generations that write to one response
        self.chunks: Chunks | None = None  # where the connection offers it
        self.tally = UsageTally()

    async def consume_all(self, job: Job, request: Generate) -> None:
        """Submit every prompt and write until all have ended; what is left is aborted."""
        async with AsyncExitStack() as stack:
            generations = []
            for place, prompt in enumerate(job.prompts):
                if place:
                    await trio.lowlevel.checkpoint()  # many prompts must not hold up the others
                wanted = job.id if len(job.prompts) == 1 else f"{job.id}-{place}"
                claimed = self._service.claim_id(wanted)
                stack.callback(self._service.release_id, claimed)
                generation = self._service.engine.submit(
                    prompt,
                    job.params,
                    request_id=claimed,
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                )
                generations.append(await stack.enter_async_context(generation))
            if len(generations) == 1:
                await self._consume(0, generations[0], job.writer)
                return
            self._alone = False
            async with trio.open_nursery() as nursery:
                for place, generation in enumerate(generations):
                    nursery.start_soon(self._consume, place, generation, job.writer)

    async def _consume(self, prompt: int, generation: Generation, writer: Writer) -> None:
        async for delta in generation:
            if delta.finish_reason is not None:
                self._note_end(prompt, delta)
            if self._call.first_at is None and delta.token_ids:
                self._call.first_at = trio.current_time()
            data = writer.push(prompt, delta)
            if not data or self._send is None:
                continue
            if self._alone:
                await self._write(data)
            else:
                async with self._turn:
                    await self._write(data)
            if self.chunks is not None and generation.shortcut is None:
                generation.shortcut = _Shortcut(prompt, writer, self.chunks)

    def _note_end(self, prompt: int, delta: Delta) -> None:
        reason = delta.finish_reason
        assert reason is not None
        if delta.usage is not None:
            self.tally.add(prompt, delta.usage)
            self._call.prompt_tokens = self.tally.prompt_tokens
            self._call.completion_tokens = self.tally.completion_tokens
        failure = failure_of(reason, delta.error)
        if failure is not None:
            raise failure

    async def start(self) -> None:
        """Only now is it known that the request can be served, so only now comes a status."""
        if not self._started and self._send is not None:
            self._started = True
            await self._send({**START, "headers": EVENT_HEADERS})
            self._call.event_stream = True

    async def _write(self, data: bytes) -> None:
        assert self._send is not None
        if not self._started:
            await self.start()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
