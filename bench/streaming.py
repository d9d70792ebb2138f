"""What HTTP streaming adds: processor time per streamed chunk at 32 streams, on a tiny model.

A server and an engine without HTTP generate the same load, each in a process of its own; the model
is so small that what differs is the cost of HTTP. `python -m bench.streaming [--json]`.
"""

import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import trio

from aserve.testing.tiny import write_tiny_model
from bench import machine, processes, starts

STREAMS, REQUESTS, PROMPT_LEN, OUTPUT_LEN = 32, 96, 16, 256
VOCAB = 300  # of the tiny model, the specials at its end left out
BAR_US = 150.0
FLAGS = ("--compute.threads", "1")


def measure(rounds: int) -> dict[str, object]:
    """Medians are of whole rounds, server and engine in turn."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(pathlib.Path(folder) / "tiny"))
        for _ in range(rounds):
            served_s, chunks = serve_once(model)
            engine_s = engine_once(model)
            found.append((1e6 * (served_s - engine_s) / chunks, served_s, engine_s, chunks))
    added_us, served_s, engine_s, chunks = sorted(found)[len(found) // 2]
    return {
        "machine": machine.line(),
        "streams": STREAMS,
        "chunks": chunks,
        "server_us_per_chunk": round(1e6 * served_s / chunks, 1),
        "engine_us_per_token": round(1e6 * engine_s / (REQUESTS * OUTPUT_LEN), 1),
        "http_us_per_chunk": round(added_us, 1),
        "bar_us": BAR_US,
    }


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(8, VOCAB) for _ in range(PROMPT_LEN)] for _ in range(REQUESTS)]


def serve_once(model: str) -> tuple[float, int]:
    """Processor seconds of the server and the chunks its clients got."""
    from aserve.bench.serve import drive
    from aserve.bench.workload import Ask

    with starts.aserve_server(model, *FLAGS) as engine:
        asks = [Ask(list(prompt), OUTPUT_LEN, 0.0) for prompt in prompts()]
        trio.run(drive, engine.server, asks[:4], STREAMS)
        before_s = processes.cpu_s(engine.pid)
        seen = trio.run(drive, engine.server, asks, STREAMS)
        spent_s = processes.cpu_s(engine.pid) - before_s
    if errors := [one.error for one in seen if one.error]:
        raise RuntimeError(errors[0])
    return spent_s, sum(len(one.chunks_s) for one in seen)


def engine_once(model: str) -> float:
    """Processor seconds of an engine without HTTP, in a fresh process."""
    command = (sys.executable, "-m", "bench.streaming", "--engine", model)
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def run_engine(model: str) -> float:
    import aserve

    params = aserve.SamplingParams(max_tokens=OUTPUT_LEN, ignore_eos=True)
    limit = trio.Semaphore(STREAMS)
    async with aserve.open_engine(model, compute__threads=1) as engine:

        async def read(prompt: list[int]) -> None:
            async with limit:
                async for _ in engine.generate(prompt, params):
                    pass

        async def read_all(asked: list[list[int]]) -> None:
            async with trio.open_nursery() as nursery:
                for prompt in asked:
                    nursery.start_soon(read, prompt)

        await read_all(prompts()[:4])
        before_s = time.process_time()
        await read_all(prompts())
        return time.process_time() - before_s


def text(found: dict[str, object]) -> str:
    return (
        "HTTP adds {http_us_per_chunk} us of processor time to a streamed chunk at {streams} "
        "streams (bar {bar_us:.0f}); server {server_us_per_chunk} us a chunk, engine alone "
        "{engine_us_per_token} us a token".format(**found)
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.streaming", description=__doc__)
    parser.add_argument("--engine", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.engine:
        print(trio.run(run_engine, given.engine))
    else:
        result = measure(given.rounds)
        print(json.dumps(result, indent=2) if given.json else text(result))
