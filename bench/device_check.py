"""Builds the CUDA kernels, compares each with its twin, times it: `python -m bench.device_check`.

For a machine with a GPU, in under eight minutes; `--json PATH` records what is printed. Without one
it builds, holds the kernels to their limits, says so and exits 2. A difference or a limit broken
exits 1. `--library PATH` takes a library that was built elsewhere. Needs nvcc, CUTLASS's headers,
torch with CUDA, and what aserve's core and native kernels need: msgspec, numpy, pybind11.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from aserve.errors import ConfigError
from aserve.tensor.cuda_library import NoDevice
from bench import machine
from csrc.cuda import build, report

SECONDS_MAX = 450
ROOT = pathlib.Path(__file__).resolve().parents[1]


def build_native() -> None:
    """The sampler's twin lives beside the CPU's kernels; a bare checkout has none."""
    try:
        import aserve._native  # noqa: F401
    except ImportError:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def build_library(library: pathlib.Path) -> list[str]:
    """Builds, prints every kernel; returns what is over its limit. Raises build.BuildError."""
    begun = time.monotonic()
    made = build.build(build.find_tools(), library)
    print(f"built in {time.monotonic() - begun:.0f} s")
    kernels = [kernel for one in made for kernel in report.kernels(one.log)]
    print(report.table(kernels))
    findings = report.over_limits(kernels, report.read_limits())
    if report.find_cuobjdump() is None:
        print("no cuobjdump: machine code was not looked at")
        return findings
    return findings + report.missing_instructions({one.source: one.path for one in made})


def compare(library: pathlib.Path, seed: int, until: float) -> Iterator[tuple[str, Any]]:
    """Each case; those that no time is left for are named, and are no pass."""
    from aserve.tensor.cuda import open_cuda
    from bench import device_cases, device_draws, device_trees

    plain = open_cuda(library)
    ops = device_cases.PoisonedOps(plain.library, plain.device)
    cases = device_cases.CASES | device_draws.CASES | device_trees.CASES
    for name, case in cases.items():
        if time.monotonic() > until:
            yield name, device_cases.Found(float("inf"), "no time was left")
        else:
            yield name, device_cases.compare(ops, case, seed)


def time_all(library: pathlib.Path, until: float) -> Iterator[Any]:
    """`Ceilings`, then rows, as long as there is time."""
    from aserve.tensor.cuda import open_cuda
    from bench import device_timings as timed

    ops = open_cuda(library)
    clock = timed.Clock(ops.device, timed.FULL.repeats)
    found = timed.ceilings(ops, timed.FULL, clock)
    yield found
    for timing in timed.timings(ops, timed.FULL):
        if time.monotonic() > until:
            print("no time is left for further rows")
            return
        yield timed.row(timing, found, clock)


def check(options: argparse.Namespace, told: dict[str, Any], begun: float) -> int:
    """On a device: compares and times. Fills in what `--json` writes; 1 if something differs."""
    told["device"] = torch.cuda.get_device_name()
    print(f"\n{told['device']}, {told['machine']}")
    failed = False
    for name, found in compare(options.library, options.seed, begun + SECONDS_MAX * 2 / 3):
        failed |= not found.passed
        told["cases"][name] = {"passed": found.passed, "problem": found.problem}
        verdict = "ok" if found.passed else "DIFFERS"
        by = found.problem or f"{found.error:.3f} of what it may differ by"
        print(f"{name:28} {verdict:8} {by}", flush=True)
    rows = time_all(options.library, begun + SECONDS_MAX)
    ceilings = next(rows)
    told["ceilings"] = dataclasses.asdict(ceilings)
    bandwidth, rate = ceilings.bandwidth / 1e12, ceilings.rate / 1e12
    print(f"\ncopy {bandwidth:.2f} TB/s, product {rate:.0f} TFLOP/s")
    print(f"{'kernel':20} {'shape':34} {'bound':8} {'floor us':>9} {'us':>9} {'over':>6}")
    for row in rows:
        told["rows"].append(dataclasses.asdict(row) | {"over": row.over})
        print(
            f"{row.kernel:20} {row.shape:34} {row.bound:8} {row.floor:9.1f} {row.taken:9.1f} "
            f"{row.over:6.2f}",
            flush=True,
        )
    return int(failed)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__)
    found.add_argument("--json", type=pathlib.Path, help="where to write what was found")
    found.add_argument("--library", type=pathlib.Path, help="a library built elsewhere")
    found.add_argument("--seed", type=int, default=1)
    return found


def main(arguments: list[str] | None = None) -> int:
    begun = time.monotonic()
    options = parser().parse_args(arguments)
    told: dict[str, Any] = {"machine": machine.line(), "cases": {}, "rows": [], "limits": []}
    try:
        if options.library is None:
            options.library = build.LIBRARY
            told["limits"] = build_library(options.library)
            print("\n".join(told["limits"]))
        build_native()
        from aserve.tensor.cuda import open_cuda

        open_cuda(options.library)
    except NoDevice as error:
        print(f"nothing was compared or timed: {error}", file=sys.stderr)
        return 1 if told["limits"] else 2
    except (build.BuildError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 1
    try:
        status = check(options, told, begun)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return max(status, int(bool(told["limits"])))


if __name__ == "__main__":
    sys.exit(main())
