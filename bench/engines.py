"""An engine under test, whatever it is: asked for a load, it says what it measured.

Servers are driven over HTTP by the client of `aserve bench serve`; libraries without a server sit
in a worker process that answers lines of JSON.
"""

import dataclasses
import json
import re
import statistics
import subprocess
import time

import trio

from aserve.bench.client import Connection, Target
from aserve.bench.measured import Seen
from aserve.bench.serve import Server, drive
from aserve.bench.workload import Fit, Prompts, Span, draw_workload
from bench.loads import Load, Measured


class EngineError(Exception):
    """The engine failed, or gave other than what was asked: its number would mean nothing."""


class HttpEngine:
    """A server under test. Prompts are random token ids below `vocab`, new ones in every load."""

    def __init__(self, name: str, pid: int, server: Server, vocab: int) -> None:
        self.name = name
        self.pid = pid
        self.server = server
        self.vocab = vocab
        # Engines that share a prefix cache across runs must not meet a prompt again.
        self._seed = time.time_ns()

    def measure(self, load: Load) -> Measured:
        self._seed += 1
        length = Span(load.prompt_len, load.prompt_len)
        prompts = Prompts("ids", length, shared_share=0.0, vocab=self.vocab, fit=Fit())
        output = Span(load.output_len, load.output_len)
        asks = draw_workload(
            prompts, output, n_requests=load.streams, rate_per_s=None, seed=self._seed
        )
        return measured(self.name, load, trio.run(drive, self.server, asks, None))


def measured(name: str, load: Load, seen: list[Seen]) -> Measured:
    """What the clients saw; EngineError unless each got just the tokens it asked for."""
    if errors := [one.error for one in seen if one.error]:
        raise EngineError(f"{name}: {errors[0]}")
    for one in seen:
        got = (one.prompt_tokens, one.completion_tokens)
        if got != (load.prompt_len, load.output_len):
            raise EngineError(f"{name}: {got} tokens, asked for {load}")
        if one.cached_tokens > load.prompt_len // 4:
            raise EngineError(f"{name}: {one.cached_tokens} tokens of a new prompt were cached")
    seconds = max(one.ended_s for one in seen) - min(one.sent_s for one in seen)
    first_s = statistics.median(one.ttft_s for one in seen)
    total = load.streams * load.prompt_len, load.streams * load.output_len
    return Measured(seconds, first_s, *total)


class LineEngine:
    """A worker process that is asked in lines of JSON; its first line says that it is ready."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._read()

    def measure(self, load: Load) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(load)) + "\n")
        self._process.stdin.flush()
        seen = Measured(**self._read())
        asked = (load.streams * load.prompt_len, load.streams * load.output_len)
        if (seen.prompt_tokens, seen.output_tokens) != asked:
            raise EngineError(f"{self.name}: {seen}, asked for {load}")
        return seen

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                answer: dict[str, float] = json.loads(line)
                return answer
        raise EngineError(f"{self.name}: the worker died")


Engine = HttpEngine | LineEngine


def metrics(engine: HttpEngine) -> dict[str, float]:
    """The server's Prometheus samples without labels."""
    return trio.run(_metrics, engine.server.target)


async def _metrics(target: Target) -> dict[str, float]:
    connection = Connection(target)
    await connection.send("GET", "/metrics")
    body = b""
    while piece := await connection.read():
        body += piece
    await connection.aclose()
    found = re.findall(r"^(\w+) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}
