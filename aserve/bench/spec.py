"""`aserve bench spec`: tokens a step of the model and tokens a second, with drafts and without.

All engines of a run are open at once and take turns, round by round; ratios are of medians. Answers
are greedy and end where they end, so that everybody says the same; whether they did is told.
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

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine, open_engine
from aserve.bench.plan import machine_line
from aserve.bench.spec_texts import Prompt, prompts_of
from aserve.core.request import SamplingParams

PLAIN = "none"
# Adaptive, as they are served; behind a colon a fixed depth, width and number of tokens.
DRAFTS = ("ngram", "eagle3", "eagle3:3,1,3", "eagle3:4,4,7", "eagle3:6,8,31")
TEXTS = ("questions", "own", "repeating")
ROOM = 32768  # tokens of KV


@dataclasses.dataclass(frozen=True)
class Row:
    """Medians over the rounds. `speeds` are tokens per second by number of streams, `of_plain`
    ratios to those without drafts; `per_step` is of one stream. `same`: every answer was."""

    text: str
    drafts: str
    per_step: float
    speeds: dict[int, float]
    of_plain: dict[int, float]
    same: bool


@dataclasses.dataclass(frozen=True)
class Run:
    """One turn of an engine."""

    speed: float
    per_step: float
    said: tuple[tuple[int, ...], ...]


def settings_of(drafts: str) -> dict[str, Any]:
    """`eagle3:4,4,7=PATH` as overrides of the configuration. Raises ValueError."""
    settings: dict[str, Any] = {"cache__kv_tokens": ROOM, "schedule__prefix_cache": False}
    what, _, path = drafts.partition("=")
    method, _, size = what.partition(":")
    settings["spec__method"] = method
    if path:
        settings["spec__path"] = path
    if size:
        sizes = size.split(",")
        if len(sizes) != 3 or not all(one.isdecimal() for one in sizes):
            raise ValueError(f"{drafts!r}: write METHOD[:DEPTH,TOPK,TOKENS][=PATH]")
        names = ("spec__depth", "spec__topk", "spec__tokens")
        settings |= dict(zip(names, map(int, sizes), strict=True)) | {"spec__adaptive": False}
    return settings


async def measure_once(engine: Engine, prompts: Sequence[Prompt], streams: int, most: int) -> Run:
    """All of `prompts`, so many at once; from the first request to the last token."""
    params = SamplingParams(temperature=0, max_tokens=most)
    waiting = list(enumerate(prompts))[::-1]
    done: dict[int, Completion] = {}

    async def one_stream() -> None:
        while waiting:
            place, prompt = waiting.pop()
            done[place] = await collect(engine.submit(prompt, params), prompt, params)

    started = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one_stream)
    elapsed_s = time.perf_counter() - started
    usages = [one.usage for one in done.values()]
    n_tokens = sum(usage.completion_tokens for usage in usages)
    # The first token of an answer comes with its prompt.
    steps = sum(usage.target_steps - 1 for usage in usages)
    per_step = (n_tokens - len(usages)) / max(1, steps)
    return Run(n_tokens / elapsed_s, per_step, tuple(done[n].token_ids for n in sorted(done)))


async def measure(options: argparse.Namespace) -> list[Row]:
    """Every engine at every load in every round, in another order each time."""
    dice = random.Random(1)
    cases = [PLAIN, *options.drafts]
    runs: dict[tuple[str, str, int], list[Run]] = {}
    async with AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for drafts in cases:
            opening = open_engine(options.model, **settings_of(drafts))
            engines[drafts] = await stack.enter_async_context(opening)
        count = max(options.answers, *options.streams)
        prompts = {text: await prompts_of(engines[PLAIN], text, count) for text in options.texts}
        for number in range(options.rounds + 1):
            for text in options.texts:
                for streams in options.streams:
                    some = prompts[text][: max(options.answers, streams)]
                    for drafts in dice.sample(cases, len(cases)):
                        run = await measure_once(engines[drafts], some, streams, options.tokens)
                        if number:  # the first round warms up
                            runs.setdefault((text, drafts, streams), []).append(run)
    return rows_of(runs, options.streams)


def rows_of(runs: dict[tuple[str, str, int], list[Run]], streams: Sequence[int]) -> list[Row]:
    rows: list[Row] = []
    for text, drafts in dict.fromkeys((text, drafts) for text, drafts, _ in runs):
        own = {n: runs[text, drafts, n] for n in streams}
        plain = {n: runs[text, PLAIN, n] for n in streams}
        speeds = {n: statistics.median(run.speed for run in own[n]) for n in streams}
        of_plain = {
            n: speeds[n] / statistics.median(run.speed for run in plain[n]) for n in streams
        }
        per_step = statistics.median(run.per_step for run in own[min(streams)])
        same = all(run.said == plain[n][0].said for n in streams for run in own[n])
        rows.append(Row(text, drafts, per_step, speeds, of_plain, same))
    return sorted(rows, key=lambda row: (row.text, row.drafts != PLAIN))


def table(rows: Sequence[Row], streams: Sequence[int]) -> str:
    """Markdown."""
    heads = ["1 stream" if n == 1 else f"{n} streams" for n in streams]
    lines = [
        f"| text | drafts | tokens a step | {' | '.join(heads)} |",
        "|---|---|---|" + "---|" * len(heads),
    ]
    for row in rows:
        cells = [f"{row.speeds[n]:.0f} ({row.of_plain[n]:.2f}x)" for n in streams]
        drafts = row.drafts if row.same else f"{row.drafts} (other text!)"
        lines.append(f"| {row.text} | {drafts} | {row.per_step:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument(
        "--drafts",
        nargs="+",
        default=list(DRAFTS),
        metavar="METHOD[:DEPTH,TOPK,TOKENS][=PATH]",
        help="beside none; without a size it is adaptive (default: %(default)s)",
    )
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    parser.add_argument("--answers", type=int, default=8, help="at least so many a turn")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    """1 if a text was another with drafts."""
    if min(*options.streams, options.rounds, options.answers) < 1 or options.tokens < 2:
        raise ValueError("--streams, --answers and --rounds are at least 1, --tokens at least 2")
    for drafts in options.drafts:
        settings_of(drafts)
    rows = trio.run(measure, options)
    if options.json:
        told = {"machine": machine_line(), "rows": [dataclasses.asdict(row) for row in rows]}
        print(json.dumps(told))
    else:
        print(
            f"greedy answers of up to {options.tokens} tokens; tokens per second, medians of "
            f"{options.rounds} interleaved rounds (x: of none)\n"
        )
        print(table(rows, options.streams))
        print(f"\n{machine_line()}")
    return 0 if all(row.same for row in rows) else 1
