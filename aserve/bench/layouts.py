"""`aserve bench layouts`: tokens per second of each layout beside one rank on this machine.

All engines of a run are open at once and take turns, round by round; ratios are of medians.
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

import msgspec
import trio

from aserve.actors.completion import collect
from aserve.actors.engine import Engine, open_engine
from aserve.bench.bundles import measure_bundles
from aserve.bench.plan import machine_line
from aserve.bench.plan_cost import PlanCost, plan_cost
from aserve.bench.planes import measure_planes
from aserve.core.config import Layout
from aserve.core.request import SamplingParams

# Name, axes, numerics. The first is what the others are compared with.
LAYOUTS = (
    "one rank",
    "tp=3",
    "tp=3 fast",
    "pp=2",
    "pp=3",
    "pp=2,tp=3",
    "tp=3,dp=3",
    "tp=3,cp=3",
)
PREFILL_LEN, DECODE_PROMPT_LEN = 512, 32
ROOM = 16384  # tokens of KV


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians over the rounds; `of_one` are ratios to the first row's."""

    layout: str
    live: str
    decode_1: float
    decode_n: float
    prefill: float
    of_one: tuple[float, float, float]


def axes_of(layout: str) -> dict[str, int]:
    """`pp=2,tp=3 fast` as sizes by axis. Raises ValueError."""
    axes: dict[str, int] = {}
    for part in layout.partition(" ")[0].split(",") if layout != "one rank" else ():
        axis, _, size = part.partition("=")
        if not size.isdecimal() or axis not in Layout.__struct_fields__:
            raise ValueError(f"{layout!r} is no layout: write such as pp=2,tp=3 or 'tp=3 fast'")
        axes[axis] = int(size)
    return axes


def settings_of(layout: str, live: str) -> dict[str, Any]:
    """Overrides of the configuration. Raises ValueError."""
    settings: dict[str, Any] = {"cache__kv_tokens": ROOM, "schedule__prefix_cache": False}
    if layout == "one rank":
        return settings
    settings |= {f"layout__{axis}": size for axis, size in axes_of(layout).items()}
    numerics = layout.partition(" ")[2] or "exact"
    return settings | {"layout__numerics": numerics, "ranks__live": live}


async def measure_once(engine: Engine, dice: random.Random, streams: int, n_tokens: int) -> float:
    """Tokens per second from the first request to the last token."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    length = PREFILL_LEN if n_tokens == 1 else DECODE_PROMPT_LEN
    length = min(length, engine.context_len - n_tokens)
    prompts = [
        tuple(dice.randrange(engine.vocab_size // 8, engine.vocab_size) for _ in range(length))
        for _ in range(streams)
    ]
    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts:
            nursery.start_soon(collect, engine.submit(prompt, params), prompt, params)
    elapsed_s = time.perf_counter() - started
    return streams * (length if n_tokens == 1 else n_tokens) / elapsed_s


async def measure(options: argparse.Namespace) -> list[Row]:
    """Every layout in every round, in another order each time."""
    dice = random.Random(1)
    cases = [("one rank", "auto")]
    cases += [
        (layout, live)
        for live in options.live
        for layout in options.layouts
        if layout != "one rank"
    ]
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {case: [] for case in cases}
    async with AsyncExitStack() as stack:
        engines: dict[tuple[str, str], Engine] = {}
        for layout, live in cases:
            opening = open_engine(options.model, **settings_of(layout, live))
            engines[layout, live] = await stack.enter_async_context(opening)
        for number in range(options.rounds + 1):
            order = list(cases)
            dice.shuffle(order)
            for case in order:
                speeds = [
                    await measure_once(engines[case], dice, streams, n_tokens)
                    for streams, n_tokens in (
                        (1, options.tokens),
                        (options.streams, options.tokens),
                        (1, 1),
                    )
                ]
                if number:  # the first round warms up
                    found[case].append(tuple(speeds))
    return rows_of(found)


def rows_of(found: dict[tuple[str, str], list[tuple[float, ...]]]) -> list[Row]:
    medians = {
        case: [statistics.median(column) for column in zip(*speeds, strict=True)]
        for case, speeds in found.items()
    }
    one = next(iter(medians.values()))
    return [
        Row(layout, live, a, b, c, (a / one[0], b / one[1], c / one[2]))
        for (layout, live), (a, b, c) in medians.items()
    ]


def table(rows: Sequence[Row], streams: int) -> str:
    """Markdown."""
    lines = [
        f"| layout | ranks | decode, 1 stream | {streams} streams | prefill {PREFILL_LEN} |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{speed:.0f} ({ratio:.2f}x)"
            for speed, ratio in zip(
                (row.decode_1, row.decode_n, row.prefill), row.of_one, strict=True
            )
        ]
        lines.append(f"| {row.layout} | {row.live} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plan_table(costs: dict[str, PlanCost]) -> str:
    """Markdown."""
    lines = [
        "| layout | bytes of a plan | leader, us a step | a rank, us a step |",
        "|---|---|---|---|",
    ]
    for layout, cost in costs.items():
        lines.append(
            f"| {layout} | {cost.plan_bytes:.0f} | {cost.leader_us:.0f} | {cost.rank_us:.0f} |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="AXIS=N,...")
    parser.add_argument("--live", nargs="+", default=["thread"], choices=["thread", "process"])
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="generated by each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    if min(options.streams, options.rounds) < 1 or options.tokens < 2:
        raise ValueError("--streams and --rounds are at least 1, --tokens at least 2")
    costs = {
        layout: plan_cost(Layout(**axes_of(layout)))
        for layout in options.layouts
        if not layout.endswith(" fast")
    }
    rows = trio.run(measure, options)
    planes, bundles = measure_planes(), measure_bundles()
    if options.json:
        found = {
            "machine": machine_line(),
            "rows": [dataclasses.asdict(row) for row in rows],
            "plans": {layout: msgspec.to_builtins(cost) for layout, cost in costs.items()},
            "planes": planes,
            "bundles": msgspec.to_builtins(bundles),
        }
        print(json.dumps(found))
        return 0
    print(f"tokens per second, medians of {options.rounds} interleaved rounds (x: of one rank)\n")
    print(table(rows, options.streams))
    print("\n32 sequences decoding; a rank beside its model\n")
    print(plan_table(costs))
    print("\nbetween two ranks\n\n```")
    for line in (*planes, *bundles):
        print(line)
    print("```\n")
    print(machine_line())
    return 0
