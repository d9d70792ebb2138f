"""`aserve bench kernels`: each native operation beside its floor and its plain torch twin.

The floor is the larger of bytes over the bandwidth and operations over the rate, both measured in
the same run. Small shapes live in caches and may beat a floor of memory; their cost is the call.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from aserve import _native
from aserve.bench.kernel_cases import KERNELS, Case, cases
from aserve.bench.plan import machine_line
from aserve.tensor.native import NativeOps

PROBE_BYTES = 256 << 20
PROBE_SIDE = 2048
BURST_S = 0.002  # one timing covers at least this much work


class Row(msgspec.Struct, frozen=True):
    """Microseconds a call, the best of several bursts; `of_floor` is floor over native."""

    kernel: str
    shape: str
    floor: float
    bound: str  # "memory" or "compute"
    native: float
    of_floor: float
    twin: float
    torch: float | None


class Machine(msgspec.Struct, frozen=True):
    """What this run measured: bytes per second read, bfloat16 operations per second."""

    bandwidth: float
    rate: float


def burst(call: Callable[[], object]) -> float:
    """Seconds a call, over as many calls as fill a burst."""
    calls, spent = 1, 0.0
    while spent < BURST_S:
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - begin
        if spent < BURST_S:
            calls = max(calls + 1, int(calls * min(20, 1.2 * BURST_S / max(spent, 1e-7))))
    return spent / calls


def best(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Each call's best burst, the calls taking turns: what disturbs one disturbs all."""
    found = [float("inf")] * len(calls)
    for call in calls:
        call()
    for _ in range(rounds):
        for index, call in enumerate(calls):
            found[index] = min(found[index], burst(call))
    return found


def probe(ops: NativeOps, rounds: int) -> Machine:
    """Bandwidth of a plain sum over memory; rate of the better of two square products."""
    memory = torch.ones(PROBE_BYTES // 4)
    weight = torch.randn(PROBE_SIDE, PROBE_SIDE).bfloat16()
    packed, x = ops.pack(weight), torch.randn(512, PROBE_SIDE)
    x_bf16 = x.bfloat16()
    read_s, ours_s, theirs_s = best(
        [
            memory.sum,
            lambda: ops.linear(x, packed),
            lambda: torch.nn.functional.linear(x_bf16, weight),
        ],
        rounds,
    )
    operations = 2 * len(x) * PROBE_SIDE * PROBE_SIDE
    return Machine(PROBE_BYTES / read_s, operations / min(ours_s, theirs_s))


def measure(case: Case, machine: Machine, rounds: int) -> Row:
    calls = [case.native, case.twin]
    if case.torch is not None:
        calls.append(case.torch)
    native_s, twin_s, *torch_s = best(calls, rounds)
    memory_s, compute_s = case.moved / machine.bandwidth, case.ops / machine.rate
    floor_s = max(memory_s, compute_s)
    return Row(
        kernel=case.kernel,
        shape=case.shape,
        floor=floor_s * 1e6,
        bound="memory" if memory_s >= compute_s else "compute",
        native=native_s * 1e6,
        of_floor=floor_s / native_s,
        twin=twin_s * 1e6,
        torch=torch_s[0] * 1e6 if torch_s else None,
    )


def line(row: Row) -> str:
    beside = "" if row.torch is None else f"{row.torch:10.1f} {row.torch / row.native:6.2f}x"
    return (
        f"{row.kernel:12} {row.shape:30} {row.floor:10.1f} {row.bound:8} {row.native:10.1f} "
        f"{row.of_floor:7.0%} {row.twin:11.1f} {row.twin / row.native:7.1f}x {beside}"
    ).rstrip()


HEADING = (
    f"{'kernel':12} {'shape':30} {'floor us':>10} {'bound':8} {'native us':>10} {'floor':>7} "
    f"{'twin us':>11} {'':8} {'torch us':>10}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--rounds", type=int, default=5, help="bursts of each call; the best counts"
    )
    parser.add_argument("--only", nargs="+", choices=sorted(KERNELS), default=list(KERNELS))
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    if options.threads < 1 or options.rounds < 1:
        raise ValueError("--threads and --rounds are at least 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ops = NativeOps(options.threads)
    machine = probe(ops, options.rounds)
    about = (
        f"{machine_line()}, level {_native.level()}, {options.threads} threads; read "
        f"{machine.bandwidth / 1e9:.1f} GB/s, bfloat16 products {machine.rate / 1e9:.0f} GFLOP/s"
    )
    if not options.json:
        print(HEADING, flush=True)
    rows = []
    for case in cases(ops, options.only):
        rows.append(measure(case, machine, options.rounds))
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        told = {"machine": about, "measured": msgspec.to_builtins(machine)}
        print(json.dumps({**told, "rows": [msgspec.to_builtins(row) for row in rows]}))
    else:
        print(about)
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="aserve bench kernels", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
