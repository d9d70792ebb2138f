"""`aserve bench kernels`: each native operation beside its floor and its plain twin.

The floor is the larger of bytes over the bandwidth and operations over the rate, both measured in
the same run. Small shapes live in caches and may beat a floor of memory; their cost is the call.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

import msgspec
import torch

from aserve import _native
from aserve.bench.cases import KERNELS, Case, cases
from aserve.bench.ceilings import Ceilings, best
from aserve.bench.plan import machine_line
from aserve.tensor.native import NativeOps


class Row(msgspec.Struct, frozen=True):
    """Microseconds a call, the best of several bursts; `of_floor` is floor over native.

    `base` is what `bar` compares with: the time of one row where rows are verified, else the floor.
    `limit` is what a call may take at most.
    """

    kernel: str
    shape: str
    floor: float
    bound: str  # "memory" or "compute"
    native: float
    of_floor: float
    twin: float
    torch: float | None
    base: float | None
    bar: float | None
    limit: float | None

    @property
    def ratio(self) -> float | None:
        """What the bar is about: native over its base."""
        return None if self.base is None else self.native / self.base


def measure(case: Case, ceilings: Ceilings, rounds: int) -> Row:
    calls = [case.native, case.twin]
    calls += [call for call in (case.torch, case.base) if call is not None]
    native_s, twin_s, *rest = best(calls, rounds)
    torch_s = rest.pop(0) if case.torch is not None else None
    memory_s = case.moved / ceilings.bandwidth(case.span or case.moved)
    compute_s = case.ops / ceilings.rate
    floor_s = max(memory_s, compute_s)
    base_s = rest[0] if rest else floor_s if case.bar is not None else None
    return Row(
        kernel=case.kernel,
        shape=case.shape,
        floor=floor_s * 1e6,
        bound="memory" if memory_s >= compute_s else "compute",
        native=native_s * 1e6,
        of_floor=floor_s / native_s,
        twin=twin_s * 1e6,
        torch=None if torch_s is None else torch_s * 1e6,
        base=None if base_s is None else base_s * 1e6,
        bar=case.bar,
        limit=case.limit,
    )


def line(row: Row) -> str:
    beside = "" if row.torch is None else f"{row.torch:10.1f} {row.torch / row.native:6.2f}x"
    if row.bar is not None and row.ratio is not None:
        verdict = "met" if row.ratio <= row.bar else "MISSED"
        beside += f"{row.ratio:8.2f}x, bar {row.bar:g}x {verdict}"
    if row.limit is not None:
        verdict = "met" if row.native <= row.limit else "MISSED"
        beside += f"{'':8} limit {row.limit:g} us {verdict}"
    return (
        f"{row.kernel:12} {row.shape:34} {row.floor:10.1f} {row.bound:8} {row.native:10.1f} "
        f"{row.of_floor:7.0%} {row.twin:11.1f} {row.twin / row.native:7.1f}x {beside}"
    ).rstrip()


HEADING = (
    f"{'kernel':12} {'shape':34} {'floor us':>10} {'bound':8} {'native us':>10} {'floor':>7} "
    f"{'twin us':>11} {'':8} {'torch us':>10}"
)


def about(options: argparse.Namespace, ceilings: Ceilings) -> str:
    told = ceilings.told()
    spans = told["bandwidth"]
    assert isinstance(spans, dict)
    reads = ", ".join(f"{rate / 1e9:.1f} at {span}" for span, rate in spans.items())
    return (
        f"{machine_line()}, level {_native.level()}, {options.threads} threads; reads in GB/s: "
        f"{reads}; bfloat16 products {ceilings.rate / 1e9:.0f} GFLOP/s"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--rounds", type=int, default=5, help="bursts of each call; the best counts"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(KERNELS), default=list(KERNELS))
    parser.add_argument("--match", default="", help="only shapes with this in them")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    if options.threads < 1 or options.rounds < 1:
        raise ValueError("--threads and --rounds are at least 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ops = NativeOps(options.threads)
    ceilings = Ceilings(ops, options.rounds)
    if not options.json:
        print(HEADING, flush=True)
    rows = []
    with torch.inference_mode():
        for case in cases(ops, options.only):
            if options.match not in case.shape:
                continue
            rows.append(measure(case, ceilings, options.rounds))
            if not options.json:
                print(line(rows[-1]), flush=True)
    if options.json:
        told = {"machine": about(options, ceilings), "measured": ceilings.told()}
        shown = [{**msgspec.to_builtins(row), "ratio": row.ratio} for row in rows]
        print(json.dumps({**told, "rows": shown}))
    else:
        print(about(options, ceilings))
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="aserve bench kernels", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
