"""The load generator against a small server that speaks just enough of the protocol."""

import argparse
import functools
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from aserve.bench import serve
from aserve.bench.client import Connection, Events, Malformed, Target
from aserve.bench.measured import Seen, quantile, summarize, table
from aserve.bench.workload import Ask, Fit, Prompts, Span, draw_workload


class Server:
    """Answers /models, and /completions with one chunk a token; counts how busy it gets."""

    def __init__(
        self, *, usage: bool = True, status: int = 200, cut_after: int = -1, steps: int = 0
    ) -> None:
        self.usage, self.status, self.cut_after, self.steps = usage, status, cut_after, steps
        self.bodies: list[dict[str, object]] = []
        self.n_connections = self.n_now = self.n_now_max = 0

    async def handle(self, stream: trio.SocketStream) -> None:
        self.n_connections += 1
        data = b""
        while True:
            while b"\r\n\r\n" not in data:
                more = await stream.receive_some()
                if not more:
                    return
                data += more
            head, _, data = data.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            while len(data) < length:
                data += await stream.receive_some()
            body, data = data[:length], data[length:]
            if head.startswith(b"GET /v1/models "):
                await stream.send_all(_fixed(200, {"data": [{"id": "fake"}]}))
                continue
            self.bodies.append(json.loads(body))
            self.n_now += 1
            self.n_now_max = max(self.n_now_max, self.n_now)
            try:
                if not await self.answer(stream, self.bodies[-1]):
                    return
            finally:
                self.n_now -= 1

    async def answer(self, stream: trio.SocketStream, body: dict[str, object]) -> bool:
        if self.status != 200:
            await stream.send_all(_fixed(self.status, {"error": {"message": "queue full"}}))
            return True
        await stream.send_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        n_tokens = int(str(body["max_tokens"]))
        for number in range(n_tokens):
            if number == self.cut_after:
                return False
            await trio.lowlevel.checkpoint()
            await stream.send_all(_event({"choices": [{"text": "x", "finish_reason": None}]}))
        if self.usage:
            prompt = body["prompt"]
            prompt_tokens = len(prompt.split()) + 1 if isinstance(prompt, str) else len(prompt)
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": n_tokens}
            usage |= {"target_steps": self.steps} if self.steps else {}
            await stream.send_all(_event({"choices": [], "usage": usage}))
        await stream.send_all(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        return True


def _fixed(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(value: object) -> bytes:
    return _chunk(b"data: " + json.dumps(value).encode() + b"\n\n")


@asynccontextmanager
async def running(handle: Callable[[trio.SocketStream], Awaitable[None]]) -> AsyncIterator[str]:
    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(
            functools.partial(trio.serve_tcp, handle, 0, host="127.0.0.1")
        )
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def flags(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(given)


async def test_every_token_and_request_is_counted() -> None:
    server = Server()
    async with running(server.handle) as url:
        arguments = flags(
            *("--url", url, "--requests", "12", "--concurrency", "3", "--warmup", "2"),
            *("--prompt-len", "20:40", "--output-len", "5", "--ignore-eos", "--temperature", "0"),
        )
        summary = await serve.measure(arguments)
    assert summary["model"] == "fake"
    assert summary["requests"] == 12
    assert summary["failures"] == 0
    assert summary["completion_tokens"] == 60
    measured = server.bodies[-12:]
    lengths = [len(str(body["prompt"]).split()) + 1 for body in measured]
    assert summary["prompt_tokens"] == sum(lengths)
    assert 20 <= min(lengths) < max(lengths) <= 40
    assert server.n_now_max == 3
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in measured)
    assert "12 requests, 0 failed" in table(summary)


async def test_a_server_that_tells_its_steps_shows_its_accepted_length() -> None:
    asked = ("--requests", "2", "--concurrency", "1", "--warmup", "0", "--output-len", "9")
    async with running(Server(steps=5).handle) as url:
        summary = await serve.measure(flags("--url", url, *asked))
    assert summary["accepted_len_mean"] == 2.0  # 8 tokens after the first in 4 steps
    assert "accepted length: 2.00 tokens a step" in table(summary)
    for steps, mean in ((9, 1.0), (0, None)):
        async with running(Server(steps=steps).handle) as url:
            summary = await serve.measure(flags("--url", url, *asked))
        assert summary["accepted_len_mean"] == mean
        assert "accepted length" not in table(summary)


async def test_connections_are_kept_alive() -> None:
    server = Server()
    async with running(server.handle) as url:
        await serve.measure(flags("--url", url, "--requests", "20", "--concurrency", "2"))
    # One to list models, one to fit words, two for warm-up, two measured.
    assert server.n_connections <= 6


async def test_a_server_without_usage_is_counted_by_chunks() -> None:
    async with running(Server(usage=False).handle) as url:
        summary = await serve.measure(
            flags("--url", url, "--requests", "4", "--concurrency", "4", "--output-len", "7")
        )
    assert summary["completion_tokens"] == 28


async def test_refusals_are_failures_with_their_reason() -> None:
    server = Server()
    async with running(server.handle) as url:
        arguments = flags("--url", url, "--requests", "3", "--warmup", "0", "--prompts", "ids")
        server.status = 429
        summary = await serve.measure(arguments)
    assert summary["failures"] == 3
    assert summary["completion_tokens"] == 0
    [(reason, count)] = dict(summary["failure_reasons"]).items()  # type: ignore[call-overload]
    assert reason.startswith("status 429")
    assert count == 3


async def test_a_cut_stream_is_a_failure() -> None:
    server = Server(cut_after=3)
    async with running(server.handle) as url:
        arguments = flags("--url", url, "--requests", "2", "--warmup", "0", "--prompts", "ids")
        summary = await serve.measure(arguments)
    assert summary["failures"] == 2


async def test_an_idle_connection_closed_by_the_server_is_opened_again() -> None:
    async def answer_once(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with running(answer_once) as url:
        connection = Connection(Target.parse(url))
        for _ in range(3):
            assert (await connection.send("GET", "/")).status == 200
            assert await connection.read() == b"ok"
            assert await connection.read() == b""
        await connection.aclose()


async def test_an_endless_head_is_refused() -> None:
    async def babble(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000)

    async with running(babble) as url:
        connection = Connection(Target.parse(url))
        with pytest.raises(Malformed):
            await connection.send("GET", "/")
        await connection.aclose()


@pytest.mark.parametrize(
    "head", [b"Transfer-Encoding: chunked\r\n\r\nsoon\r\n", b"Content-Length: -5\r\n\r\n"]
)
async def test_a_body_of_no_length_is_a_failure_of_its_request(head: bytes) -> None:
    async def mumble(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 200 OK\r\n" + head)

    async with running(mumble) as url:
        server = serve.Server(Target.parse(url), "fake")
        connection = Connection(server.target)
        seen = await serve.ask(server, connection, Ask("text", 1, 0.0))
    assert seen.error is not None
    assert "a length is" in seen.error


def test_events_split_anywhere_are_the_same_events() -> None:
    wire = b'data: {"a": 1}\r\n\r\ndata: {"b": 2}\n\n: comment\n\ndata: [DONE]\n\n'
    for cut in range(len(wire)):
        events = Events()
        assert events.push(wire[:cut]) + events.push(wire[cut:]) == [b'{"a": 1}', b'{"b": 2}']


def test_the_same_seed_asks_the_same() -> None:
    prompts = Prompts("ids", Span(10, 30), shared_share=0.5, vocab=1000, fit=Fit())

    def draw(seed: int) -> list[object]:
        return list(draw_workload(prompts, Span(1, 9), n_requests=8, rate_per_s=5.0, seed=seed))

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_arrivals_are_poisson_at_the_rate() -> None:
    prompts = Prompts("ids", Span(1, 1), shared_share=0, vocab=1000, fit=Fit())
    asks = draw_workload(prompts, Span(1, 1), n_requests=4001, rate_per_s=20.0, seed=3)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(asks)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Exponential gaps: standard deviation equals mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.1
    )


def test_the_shared_share_is_common_and_the_rest_is_not() -> None:
    prompts = Prompts("ids", Span(100, 100), shared_share=0.25, vocab=50_000, fit=Fit())
    asks = draw_workload(prompts, Span(1, 1), n_requests=2, rate_per_s=None, seed=0)
    first, second = (ask.prompt for ask in asks)
    assert first[:25] == second[:25]
    assert first[25] != second[25]


def test_words_are_fitted_to_tokens() -> None:
    fit = Fit.through((64, 100), (192, 292))
    assert fit.n_words(292) == 192
    assert Fit.through((64, 0), (192, 0)).n_words(10) >= 1


@pytest.mark.parametrize("text", ["0", "9:3", "a", "1:b", "-4"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  argparse turns any ValueError into a refusal
        Span.parse(text)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert quantile([5.0], 99) == 5.0


def test_latencies_are_those_of_the_clock() -> None:
    seen = [Seen(0.0, [0.1, 0.2, 0.4], 0.5, prompt_tokens=4, completion_tokens=3)]
    summary = summarize([*seen, Seen(0.0, [], 1.0, error="gone")])
    assert summary["ttft_ms"] == {"mean": 100, "p50": 100, "p90": 100, "p99": 100}
    assert summary["tpot_ms"] == {"mean": 150, "p50": 150, "p90": 150, "p99": 150}
    assert summary["itl_ms"]["p50"] == pytest.approx(150)  # type: ignore[index]
    assert summary["e2e_ms"]["mean"] == 500  # type: ignore[index]
    assert summary["output_tokens_per_s"] == 3.0
    assert summary["failures"] == 1
    assert "failed 1 times: gone" in table(summary)


@pytest.mark.parametrize(
    "given",
    [
        ["--requests", "0"],
        ["--concurrency", "0"],
        ["--rate", "0"],
        ["--shared-prefix", "1.5"],
        ["--prompts", "ids", "--endpoint", "chat"],
        ["--extra-body", "[]"],
    ],
)
def test_flags_that_make_no_sense_are_refused(given: list[str]) -> None:
    assert serve.check(flags(*given))
    assert serve.check(flags()) is None
