"""`aserve bench pipeline`: how long stages wait for each other, with fixed and with dynamic chunks.

Measures one long prompt on this machine, then simulates the cost curve that the planner fitted
there on deeper pipelines and longer prompts.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import trio

from aserve.actors.completion import collect
from aserve.actors.engine import Engine, open_engine
from aserve.bench.plan import machine_line
from aserve.core.chunk import (
    Bounds,
    Cost,
    best_base,
    dynamic_chunks,
    fixed_chunks,
    pipeline_times,
)
from aserve.core.message import StepReport
from aserve.core.request import SamplingParams

PAGE_SIZE = 16
PIPELINES, PROMPTS, CHUNKS = (4, 8, 16), (32768, 65536, 131072), (2048, 8192)
ALL_CHUNKS = tuple(64 << at for at in range(8))  # among which the best fixed one is looked for
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One way to cut chunks: medians over rounds. `waits` are shares of each stage's time."""

    chunks: str
    n_chunks: int
    ttft_s: float
    waits: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Times to the first token are dynamic over fixed; waits are of the stage that waits longest.

    `best` is the fixed chunk that hindsight would choose for this very prompt and pipeline.
    """

    pp: int
    prompt_len: int
    base: int
    first: int
    fixed_wait: float
    dynamic_wait: float
    ttft_share: float
    best: int
    ttft_share_best: float


class Listener:
    """Notes what every rank of an engine reports."""

    def __init__(self, engine: Engine) -> None:
        self.reports: list[StepReport] = []
        meters = engine._leader.meters
        report = meters.report

        def noted(one: StepReport) -> None:
            self.reports.append(one)
            report(one)

        meters.report = noted  # type: ignore[method-assign]

    def waits(self, pp: int) -> tuple[float, ...]:
        """Each stage's share of waiting between its first start and its last end."""
        shares = []
        for stage in range(pp):
            own = [one for one in self.reports if one.rank == stage]
            waited = sum(one.waited_micros for one in own[1:])
            busy = sum(one.micros for one in own)
            shares.append(waited / (waited + busy))
        return tuple(shares)


async def prefill(engine: Engine, listener: Listener, prompt_len: int, pp: int) -> Measured:
    dice = random.Random(len(listener.reports))
    prompt = tuple(
        dice.randrange(engine.vocab_size // 8, engine.vocab_size) for _ in range(prompt_len)
    )
    listener.reports.clear()
    started = time.perf_counter()
    await collect(engine.submit(prompt, ONE_TOKEN), prompt, ONE_TOKEN)
    elapsed_s = time.perf_counter() - started
    n_chunks = sum(one.rank == 0 for one in listener.reports)
    return Measured("", n_chunks, elapsed_s, listener.waits(pp))


async def measure(options: argparse.Namespace) -> tuple[list[Measured], Cost | None]:
    """Fixed and dynamic chunks in interleaved rounds, and the cost of a stage as fitted."""
    settings: dict[str, Any] = {
        "layout__pp": options.pp,
        "ranks__live": "thread",
        "schedule__step_tokens": options.chunk,
        "schedule__prefix_cache": False,
        "cache__kv_tokens": 2 * options.prompt,
        "cache__page_size": PAGE_SIZE,
    }
    found: dict[str, list[Measured]] = {"fixed": [], "dynamic": []}
    async with AsyncExitStack() as stack:
        engines: dict[str, tuple[Engine, Listener]] = {}
        for name in found:
            opening = open_engine(
                options.model, **settings, schedule__dynamic_chunks=name == "dynamic"
            )
            engine = await stack.enter_async_context(opening)
            engines[name] = engine, Listener(engine)
        for number in range(options.rounds + 1):
            for name, (engine, listener) in engines.items():
                seen = await prefill(engine, listener, options.prompt, options.pp)
                if number:  # the first warms up
                    found[name].append(seen)
        cost = engines["dynamic"][0]._leader.planner.sizer.cost
    return [median_of(name, seen) for name, seen in found.items()], cost


def median_of(name: str, seen: Sequence[Measured]) -> Measured:
    return Measured(
        name,
        round(statistics.median(one.n_chunks for one in seen)),
        statistics.median(one.ttft_s for one in seen),
        tuple(statistics.median(waits) for waits in zip(*[o.waits for o in seen], strict=True)),
    )


def simulate(cost: Cost, measured_pp: int) -> list[Simulated]:
    """The fitted cost on deeper pipelines: a stage's share of the layers shrinks, its cost a step
    does not."""
    rows = []
    for pp in PIPELINES:
        share = measured_pp / pp
        stage = Cost(cost.a * share, cost.b * share, cost.c, cost.d * share)
        for prompt_len in PROMPTS:
            fixed = {
                chunk: pipeline_times(stage.micros, fixed_chunks(chunk, 0, prompt_len), pp)
                for chunk in ALL_CHUNKS
            }
            best = min(ALL_CHUNKS, key=lambda chunk: fixed[chunk][0])
            for chunk in CHUNKS:
                bounds = Bounds(PAGE_SIZE, 2 * prompt_len, chunk)
                first = best_base(stage, pp, 0, prompt_len, bounds)
                chunks = dynamic_chunks(stage, first, 0, prompt_len, bounds)
                ttft, waits = pipeline_times(stage.micros, chunks, pp)
                share, share_best = ttft / fixed[chunk][0], ttft / fixed[best][0]
                slowest = max(fixed[chunk][1]), max(waits)
                rows.append(
                    Simulated(pp, prompt_len, chunk, first, *slowest, share, best, share_best)
                )
    return rows


def text_of(measured: Sequence[Measured], simulated: Sequence[Simulated]) -> str:
    lines = ["| chunks | steps | time to first token, s | each stage waits |", "|---|---|---|---|"]
    for one in measured:
        waits = ", ".join(f"{wait:.1%}" for wait in one.waits)
        lines.append(f"| {one.chunks} | {one.n_chunks} | {one.ttft_s:.3f} | {waits} |")
    lines += [
        "",
        "| pp | prompt | fixed chunk | first dynamic | slowest stage waits, fixed | dynamic | time "
        "to first token, dynamic of fixed | of the best fixed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in simulated:
        lines.append(
            f"| {row.pp} | {row.prompt_len >> 10}k | {row.base} | {row.first} | "
            f"{row.fixed_wait:.1%} | {row.dynamic_wait:.1%} | {row.ttft_share:.2f}x | "
            f"{row.ttft_share_best:.2f}x ({row.best}) |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=6144, help="tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a fixed chunk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    if min(options.rounds, options.prompt) < 1 or options.pp < 2:
        raise ValueError("--rounds and --prompt are at least 1, --pp at least 2")
    measured, cost = trio.run(measure, options)
    simulated = [] if cost is None else simulate(cost, options.pp)
    if options.json:
        found = {
            "machine": machine_line(),
            "measured": [dataclasses.asdict(row) for row in measured],
            "cost": cost and cost._asdict(),
            "simulated": [dataclasses.asdict(row) for row in simulated],
        }
        print(json.dumps(found))
        return 0
    print(f"a prompt of {options.prompt} tokens at pp {options.pp}, medians of {options.rounds}\n")
    print(text_of(measured, simulated))
    if cost is None:
        print("\nno cost could be fitted (dynamic chunks are off): nothing is simulated")
    print(machine_line())
    return 0
