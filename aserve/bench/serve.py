"""`aserve bench serve`: drives any OpenAI-compatible server and reports throughput and latency.

Closed loop: `--concurrency` clients, each sending its next request when its last has ended. Open
loop: `--rate` requests per second with Poisson arrivals, whatever the server makes of them.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import time

import msgspec
import trio

from aserve.bench.client import Connection, Events, Malformed, Target
from aserve.bench.measured import Seen, summarize, table
from aserve.bench.workload import Ask, Fit, Prompts, Span, draw_workload

PROBE_WORDS = (16, 80)
BODY_BYTES_MAX = 64 << 20


class Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Text = msgspec.field(default_factory=Text)
    message: Text = msgspec.field(default_factory=Text)


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None
    target_steps: int = 0  # ours; 0: another's server


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


@dataclasses.dataclass(frozen=True)
class Server:
    """The server under load and what every request to it has in common."""

    target: Target
    model: str
    api_key: str | None = None
    chat: bool = False
    extra: dict[str, object] = dataclasses.field(default_factory=dict)
    request_s_max: float = 600.0

    @property
    def path(self) -> str:
        return self.target.prefix + ("/chat/completions" if self.chat else "/completions")

    def body(self, prompt: str | list[int], output_len: int) -> bytes:
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {}
        if not self.chat:
            asked = {"prompt": prompt}
        common = {
            "model": self.model,
            "max_tokens": output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(common | asked | self.extra)


async def ask(server: Server, connection: Connection, request: Ask) -> Seen:
    """One streamed request, timed; every failure is a `Seen` with its error."""
    body = server.body(request.prompt, request.output_len)
    seen = Seen(time.perf_counter())
    try:
        with trio.fail_after(server.request_s_max):
            await _stream(server, connection, body, seen)
        if seen.error is None and not seen.chunks_s:
            seen.error = "the stream held no token"
    except trio.TooSlowError:
        seen.error = f"no end within {server.request_s_max:g} s"
    except (OSError, Malformed, trio.BrokenResourceError, msgspec.DecodeError) as error:
        seen.error = str(error) or type(error).__name__
    if seen.error is not None:
        await connection.aclose()
    seen.ended_s = time.perf_counter()
    return seen


async def _stream(server: Server, connection: Connection, body: bytes, seen: Seen) -> None:
    response = await connection.send("POST", server.path, body)
    if response.status != 200:
        text = await _whole(connection)
        seen.error = f"status {response.status}: {text[:200].decode(errors='replace')}"
        return
    events = Events()
    n_chunks = 0
    decode = msgspec.json.Decoder(Chunk).decode
    while piece := await connection.read():
        at_s = time.perf_counter()
        for chunk in map(decode, events.push(piece)):
            if chunk.error:
                seen.error = f"in the stream: {bytes(chunk.error)[:200].decode(errors='replace')}"
            if any(c.text or c.delta.content or c.delta.reasoning_content for c in chunk.choices):
                seen.chunks_s.append(at_s)
                n_chunks += 1
            if chunk.usage is not None:
                seen.prompt_tokens = chunk.usage.prompt_tokens
                seen.completion_tokens = chunk.usage.completion_tokens
                seen.target_steps = chunk.usage.target_steps
                details = chunk.usage.prompt_tokens_details
                seen.cached_tokens = (details and details.cached_tokens) or 0
    # A server without usage in streams: it sends a token a chunk, most of the time.
    seen.completion_tokens = seen.completion_tokens or n_chunks


async def _whole(connection: Connection) -> bytes:
    body = b""
    while (piece := await connection.read()) and len(body) < BODY_BYTES_MAX:
        body += piece
    return body


async def drive(server: Server, asks: list[Ask], concurrency: int | None) -> list[Seen]:
    """Send every ask at its time, at most `concurrency` at once (None: no limit)."""
    seen: dict[int, Seen] = {}
    idle: list[Connection] = []
    limit = trio.Semaphore(concurrency or len(asks))
    start_s = trio.current_time()

    async def run(number: int) -> None:
        # The most recently used connection first: it is the least likely to have been closed.
        connection = idle.pop() if idle else Connection(server.target, server.api_key)
        try:
            seen[number] = await ask(server, connection, asks[number])
        finally:
            idle.append(connection)
            limit.release()

    async with trio.open_nursery() as nursery:
        for number, request in enumerate(asks):
            await trio.sleep_until(start_s + request.at_s)
            await limit.acquire()
            nursery.start_soon(run, number)
    for connection in idle:
        await connection.aclose()
    return [seen[number] for number in range(len(asks))]


async def get_json(target: Target, path: str, api_key: str | None) -> dict[str, object]:
    """ConnectionError if the server cannot be reached or does not answer with an object."""
    connection = Connection(target, api_key)
    try:
        response = await connection.send("GET", path)
        body = await _whole(connection)
        if response.status != 200:
            raise ConnectionError(f"GET {path}: status {response.status}: {body[:200]!r}")
        return msgspec.json.decode(body, type=dict[str, object])
    except (Malformed, msgspec.DecodeError, trio.BrokenResourceError) as error:
        raise ConnectionError(f"GET {path}: {error}") from error
    finally:
        await connection.aclose()


async def first_model(target: Target, api_key: str | None) -> str:
    listed = await get_json(target, target.prefix + "/models", api_key)
    data = listed.get("data")
    if not isinstance(data, list) or not data:
        raise ConnectionError("the server lists no model; name one with --model")
    return str(data[0]["id"])


async def fit_words(server: Server, prompts: Prompts) -> Fit:
    """Measure how words become tokens here; also the first warm-up. Without usage: one each."""
    points = []
    connection = Connection(server.target, server.api_key)
    for n_words in PROBE_WORDS:
        text = " ".join(prompts.words(random.Random(n_words), n_words))
        seen = await ask(server, connection, Ask(text, 1, 0.0))
        points.append((n_words, seen.prompt_tokens))
        if seen.error is not None:
            raise ConnectionError(f"a first request failed: {seen.error}")
    await connection.aclose()
    if not all(tokens for _, tokens in points):
        return Fit()
    return Fit.through(points[0], points[1])


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """The whole run: find the model, fit lengths, warm up, drive, summarize."""
    target = Target.parse(arguments.url)
    extra = dict(arguments.extra_body)
    if arguments.temperature is not None:
        extra["temperature"] = arguments.temperature
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    server = Server(
        target=target,
        model=arguments.model or await first_model(target, arguments.api_key),
        api_key=arguments.api_key,
        chat=arguments.endpoint == "chat",
        extra=extra,
        request_s_max=arguments.timeout,
    )
    prompts = Prompts(
        arguments.prompts,
        arguments.prompt_len,
        shared_share=arguments.shared_prefix,
        vocab=arguments.vocab,
        fit=Fit(),
    )
    if arguments.prompts != "ids":
        prompts.fit = await fit_words(server, prompts)
    await _warm_up(server, prompts, arguments)
    asks = draw_workload(
        prompts,
        arguments.output_len,
        n_requests=arguments.requests,
        rate_per_s=arguments.rate,
        seed=arguments.seed,
    )
    cpu_s = time.process_time()
    seen = await drive(server, asks, arguments.concurrency)
    summary = {"url": arguments.url, "model": server.model} | summarize(seen)
    return summary | {"client_cpu_s": round(time.process_time() - cpu_s, 3)}


async def _warm_up(server: Server, prompts: Prompts, arguments: argparse.Namespace) -> None:
    # Another seed, so that the prompts measured later are not in the server's cache.
    asks = draw_workload(
        prompts,
        Span(1, min(8, arguments.output_len.high)),
        n_requests=arguments.warmup,
        rate_per_s=None,
        seed=arguments.seed + 1_000_003,
    )
    seen = await drive(server, asks, arguments.concurrency) if asks else []
    if seen and all(one.error for one in seen):
        raise ConnectionError(f"every warm-up request failed: {seen[0].error}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `aserve bench serve`."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    add("--model", help="as the server calls it (default: the first it lists)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="sent as a bearer token")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--requests", type=int, default=64, metavar="N", help="default: %(default)s")
    add("--concurrency", type=int, metavar="N", help="at once (default: 8; with --rate no limit)")
    add("--rate", type=float, metavar="R", help="open loop: Poisson arrivals, R a second")
    add("--prompt-len", type=Span.parse, default=Span(128, 128), metavar="N|LOW:HIGH")
    add("--output-len", type=Span.parse, default=Span(128, 128), metavar="N|LOW:HIGH")
    add(
        "--prompts",
        default="words",
        metavar="words|ids|FILE",
        help="random words, random token ids, or passages of a text file (default: words)",
    )
    add("--vocab", type=int, default=32000, metavar="N", help="ids are drawn below this")
    add("--shared-prefix", type=float, default=0.0, metavar="SHARE", help="0 to 1 of each prompt")
    add("--ignore-eos", action="store_true", help="generate the full output length")
    add("--temperature", type=float, help="default: the server's")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="merged into requests")
    add("--warmup", type=int, default=4, metavar="N", help="requests not measured")
    add("--timeout", type=float, default=600.0, metavar="S", help="per request")
    add("--seed", type=int, default=0)
    add("--json", action="store_true", help="the summary as JSON on stdout")


def check(arguments: argparse.Namespace) -> str | None:
    """What is wrong with the flags taken together, or None."""
    wrong = {
        "--requests must be 1 or more": arguments.requests < 1,
        "--warmup must be 0 or more": arguments.warmup < 0,
        "--concurrency must be 1 or more": arguments.concurrency is not None
        and arguments.concurrency < 1,
        "--rate must be above 0": arguments.rate is not None and not arguments.rate > 0,
        "--shared-prefix must be from 0 to 1": not 0 <= arguments.shared_prefix <= 1,
        "--vocab must be above 256": arguments.vocab <= 256,
        "--extra-body must be an object": not isinstance(arguments.extra_body, dict),
        "--prompts ids needs --endpoint completions": arguments.prompts == "ids"
        and arguments.endpoint == "chat",
    }
    return next((message for message, is_wrong in wrong.items() if is_wrong), None)


def run(arguments: argparse.Namespace) -> int:
    """0 if every request succeeded, else 1; ValueError and OSError say what cannot be."""
    if message := check(arguments):
        raise ValueError(message)
    Target.parse(arguments.url)
    if arguments.concurrency is None and arguments.rate is None:
        arguments.concurrency = 8
    summary = trio.run(measure, arguments)
    out = json.dumps(summary, indent=2) if arguments.json else table(summary)
    print(out, file=sys.stdout, flush=True)
    return 1 if summary["failures"] else 0
