"""aserve beside transformers and llama.cpp on the same weights: interleaved rounds, ratios.

On a shared machine times vary by two; rounds in which every engine does the same load in turn make
the ratios steady. `python -m bench.peers --json` prints the rows for programs.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Iterator
from typing import NamedTuple

from aserve.core.config import Cache
from aserve.models import fetch
from aserve.models.registry import load_model
from aserve.tensor.ops import open_ops
from bench import engines, machine
from bench.engines import Engine, HttpEngine, Load

DECODE = {f"decode, {n} streams": Load(n, 128, 128) for n in (1, 8, 32)}
PREFILL = {f"prefill {n}": Load(1, n, 1) for n in (512, 2048)}
ROWS = DECODE | PREFILL
# (row, peer): the least ratio aserve must reach, from the issue that set it.
BARS = {(row, "transformers"): 1.0 for row in ROWS} | {("decode, 32 streams", "llama.cpp"): 1.0}
PEERS = ("transformers", "llama.cpp")
RSS_ALLOWANCE_MB = 600
# A prefill takes a fraction of a second, and the first after another engine's turn finds that
# engine's data in the caches: each turn takes the median of several.
PREFILLS = 5
# Small enough to be filled by the load, so that the resident size means something.
KV_TOKENS = 16384


class Row(NamedTuple):
    """Tokens per second (output for decode, prompt for prefill), medians over rounds."""

    name: str
    tokens_per_s: dict[str, float]
    ratios: dict[str, float]  # aserve over the peer
    bars: dict[str, float]


def main(arguments: argparse.Namespace) -> dict[str, object]:
    threads = arguments.threads or len(os.sched_getaffinity(0))
    path = str(fetch.resolve(arguments.model))
    with contextlib.ExitStack() as stack:
        started = list(start(stack, path, threads, arguments.peers))
        speeds = rounds(started, arguments)
        memory = resident(started[0], path)
    return {
        "machine": machine.line(),
        "model": arguments.model,
        "threads": threads,
        "rounds": arguments.rounds,
        "rows": [row_of(name, found)._asdict() for name, found in speeds.items()],
        "memory": memory,
    }


def start(
    stack: contextlib.ExitStack, path: str, threads: int, peers: list[str]
) -> Iterator[Engine]:
    """aserve first: it tells how words become tokens, which llama.cpp's streams do not say."""
    say("starting aserve")
    flags = ("--compute.threads", str(threads), "--cache.kv_tokens", str(KV_TOKENS))
    ours = stack.enter_context(engines.aserve_server(path, *flags))
    yield ours
    if "transformers" in peers:
        say("starting transformers")
        yield stack.enter_context(engines.transformers_worker(path, threads))
    if "llama.cpp" in peers:
        say("starting llama.cpp")
        yield stack.enter_context(engines.llama_cpp_server(path, threads, ours.fit))


def rounds(
    started: list[Engine], arguments: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by row and engine, one a round; a warm-up round is dropped."""
    wanted = {name: load for name, load in ROWS.items() if arguments.rows in name}
    speeds: dict[str, dict[str, list[float]]] = {
        name: {engine.name: [] for engine in started} for name in wanted
    }
    for engine in started:
        engine.measure(Load(2, 32, 8))
    for number in range(arguments.rounds):
        for name, load in wanted.items():
            for engine in started:
                speed = turn(engine, load)
                speeds[name][engine.name].append(speed)
                say(f"round {number + 1}: {name}: {engine.name} {speed:.1f} tokens/s")
    return speeds


def turn(engine: Engine, load: Load) -> float:
    """Tokens per second: of the prompt where one token is asked for, of the output elsewhere."""
    if load.output_len > 1:
        seconds, _, output_tokens = engine.measure(load)
        return output_tokens / seconds
    found = []
    for _ in range(PREFILLS):
        seconds, prompt_tokens, _ = engine.measure(load)
        # A server whose streams carry no usage was given the prompt length all the same.
        found.append((prompt_tokens or load.streams * load.prompt_len) / seconds)
    return statistics.median(found)


def row_of(name: str, found: dict[str, list[float]]) -> Row:
    medians = {engine: round(statistics.median(speeds), 1) for engine, speeds in found.items()}
    # Of each round's own ratio: what slowed one engine in a round slowed the others too.
    ratios = {
        peer: round(statistics.median(map(ratio, found["aserve"], speeds)), 3)
        for peer, speeds in found.items()
        if peer != "aserve"
    }
    bars = {peer: BARS[name, peer] for peer in ratios if (name, peer) in BARS}
    return Row(name, medians, ratios, bars)


def ratio(ours: float, theirs: float) -> float:
    return ours / theirs


def resident(engine: Engine, path: str) -> dict[str, float]:
    """Resident size after the load, beside what is allowed, in MB."""
    assert isinstance(engine, HttpEngine)
    used = machine.resident_bytes(engine.pid)
    pages = engines.metrics(engine)["aserve_kv_pages"]
    # The server does not say what its weights weigh; the same loader does.
    model = load_model(pathlib.Path(path), dtype="auto", ops=open_ops("native", 1))
    token_bytes = sum(len(region.layers) * region.item_bytes for region in model.regions())
    pool = pages * Cache().page_size * token_bytes
    return {
        "resident_mb": round(used / 1e6),
        "weights_mb": round(model.nbytes / 1e6),
        "kv_pool_mb": round(pool / 1e6),
        "allowed_mb": round((model.nbytes + pool) / 1e6 + RSS_ALLOWANCE_MB),
    }


def table(report: dict[str, object]) -> str:
    """The report as Markdown."""
    rows = report["rows"]
    assert isinstance(rows, list)
    names = list(rows[0]["tokens_per_s"])
    peers = [name for name in names if name != "aserve"]
    head = ["tokens/s", *names, *(f"aserve / {peer}" for peer in peers)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["name"], *(f"{row['tokens_per_s'][name]:.1f}" for name in names)]
        for peer in peers:
            bar = row["bars"].get(peer)
            text = f"{row['ratios'][peer]:.2f}"
            cells.append(text if bar is None else f"{text} (bar {bar:.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m bench.peers", description=__doc__)
    made.add_argument("--model", default="smollm2", help="a GGUF file, or a name (%(default)s)")
    made.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--threads", type=int, help="default: every core")
    made.add_argument("--rows", default="", help="only rows with this in their name")
    made.add_argument("--json", action="store_true")
    return made


if __name__ == "__main__":
    given = parser().parse_args()
    result = main(given)
    shown = (
        json.dumps(result, indent=2) if given.json else f"{result['machine']}\n\n{table(result)}"
    )
    print(shown)
