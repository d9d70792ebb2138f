"""`aserve bench plan`: what one step costs beside the model, in microseconds.

Planner, both codecs and a rank's bookkeeping over decode steps of full batches; no model. A step
is plan, encode, decode, apply, report, encode, decode, settle; a join step also admits a request.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from aserve.core.codec import decode_plan, decode_report, encode
from aserve.core.config import Schedule
from aserve.core.message import Result, Sampling, StepReport
from aserve.core.planner import CacheSpec, Planner
from aserve.core.replica import Replica, RowsView
from aserve.core.request import Request

PAGE_SIZE = 16
PROMPT_LEN = 128
BARS_US = {1: 100.0, 64: 400.0}  # median, from the issue that set them


class Row(msgspec.Struct, frozen=True):
    """Microseconds of a step's parts, medians over `steps` steps; `step_p90` of whole steps."""

    running: int
    steps: int
    planner: float
    codec: float
    replica: float
    step: float
    step_p90: float
    bar: float | None


def drawn(views: Sequence[RowsView]) -> tuple[Result, ...]:
    """The report of a model that always says 7."""
    return tuple(
        [
            Result(
                view.rows.seq,
                (0,) if len(view.rows.tokens) == 1 else tuple(range(len(view.rows.tokens))),
                (7,) if view.rows.sample else (),
            )
            for view in views
        ]
    )


class Loop:
    """A planner and a rank, connected by bytes; `spent_ns` per part of the last step."""

    def __init__(self, running: int, steps: int) -> None:
        pages = -(-(PROMPT_LEN + steps + 2) // PAGE_SIZE) * running
        schedule = Schedule(step_tokens=4096, running_max=running)
        self.planner = Planner(schedule, CacheSpec(PAGE_SIZE, pages), context_len=1 << 20)
        self.replica = Replica(PAGE_SIZE)
        for seq in range(running):
            prompt = tuple(range(seq, seq + PROMPT_LEN))
            self.planner.add(Request(seq, prompt, steps, Sampling(stop_ids=(0, 2))))
        self.spent_ns = (0, 0, 0)

    def step(self) -> int:
        """One step; how many sequences it drew for."""
        clock = time.perf_counter_ns
        at = [clock()]
        plan = self.planner.plan()
        if plan is None:
            return 0
        at.append(clock())
        data = encode(plan)
        received = decode_plan(data)
        at.append(clock())
        views = self.replica.apply(received).views
        at.append(clock())
        results = drawn(views)  # the model's part: not counted
        at.append(clock())
        report = StepReport(received.step, 0, self.replica.digest, results, (), (), 0)
        arrived = decode_report(encode(report))
        at.append(clock())
        outputs = self.planner.report(arrived)
        at.append(clock())
        part = [end - start for start, end in pairwise(at)]
        self.spent_ns = (part[0] + part[5], part[1] + part[4], part[2])
        return len(outputs)


def measure(running: int, steps: int) -> Row:
    """Decode steps with `running` sequences, garbage collection on, as in the server."""
    loop = Loop(running, steps + 16)
    parts: list[tuple[int, int, int]] = []
    gc.collect()
    while len(parts) < steps:
        n_drawn = loop.step()
        assert n_drawn, "the sequences ended early"
        if n_drawn == running:
            parts.append(loop.spent_ns)
    totals = sorted(sum(part) for part in parts)
    middle = len(parts) // 2
    planner, codec, replica = (
        sorted(part[index] for part in parts)[middle] / 1000 for index in range(3)
    )
    return Row(
        running=running,
        steps=steps,
        planner=planner,
        codec=codec,
        replica=replica,
        step=totals[middle] / 1000,
        step_p90=totals[len(totals) * 9 // 10] / 1000,
        bar=BARS_US.get(running),
    )


def machine_line() -> str:
    return f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def table(rows: Sequence[Row]) -> str:
    lines = ["running  planner   codec  replica    step     p90     bar   (us, medians)"]
    for row in rows:
        bar = f"{row.bar:7.0f}" if row.bar is not None else "       "
        lines.append(
            f"{row.running:7d}  {row.planner:7.1f} {row.codec:7.1f}  {row.replica:7.1f} "
            f"{row.step:7.1f} {row.step_p90:7.1f} {bar}"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    if min(options.running) < 1 or options.steps < 1:
        raise ValueError("--running and --steps are at least 1")
    rows = [measure(running, options.steps) for running in options.running]
    if options.json:
        result = {"machine": machine_line(), "rows": [msgspec.to_builtins(row) for row in rows]}
        print(json.dumps(result))
    else:
        print(table(rows))
        print(machine_line())
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="aserve bench plan", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
