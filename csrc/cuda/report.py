"""What ptxas and cuobjdump say of the compiled kernels, and whether it is within limits.toml."""

import dataclasses
import pathlib
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence

from csrc.cuda import build

LIMITS = pathlib.Path(__file__).with_name("limits.toml")
# Without them a matrix product runs on the wrong units, or copies by hand.
INSTRUCTIONS = {
    "gemm_sm90.cu": ("HGMMA", "UTMALDG"),
    "gemm_sm80.cu": ("HMMA.16816.F32.BF16", "LDGSTS"),
    "attention.cu": ("HMMA.16816.F32.BF16", "LDGSTS", "LDSM.16.M88.4", "LDSM.16.MT88.4"),
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    name: str
    arch: str
    registers: int
    spill_bytes: int  # stored and loaded
    stack_bytes: int
    shared_bytes: int  # static


@dataclasses.dataclass(frozen=True)
class Limit:
    registers: int
    shared_bytes: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0  # more: an array of registers is indexed at run time


def kernels(log: str) -> list[Kernel]:
    """From the output of `nvcc -Xptxas -v`."""
    found = []
    names = demangled(re.findall(r"Compiling entry function '(\S+)'", log))
    for part in log.split("Compiling entry function ")[1:]:
        mangled, arch = re.match(r"'(\S+)' for '(\S+)'", part).groups()
        stack, stored, loaded = map(
            int,
            re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
            ).groups(),
        )
        registers = int(re.search(r"Used (\d+) registers", part)[1])
        shared = re.search(r"(\d+) bytes smem", part)
        found.append(
            Kernel(
                short_name(names[mangled]),
                arch,
                registers,
                stored + loaded,
                stack,
                int(shared[1]) if shared else 0,
            )
        )
    return found


def demangled(names: Sequence[str]) -> dict[str, str]:
    """C++ names in full. c++filt comes with the compiler that nvcc calls."""
    if not names:
        return {}
    given = "\n".join(names)
    done = subprocess.run(["c++filt"], input=given, check=True, capture_output=True, text=True)
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def short_name(name: str) -> str:
    """The functor of one of our kernels; CUTLASS has one kernel a generation."""
    if found := re.match(r"void aserve::run<(.*?) ?>\(aserve::", name):
        return found[1].replace("aserve::", "").replace("unsigned ", "u").replace(" >", ">")
    return "gemm_sm90" if "device_kernel" in name else "gemm_sm80"


def read_limits(path: pathlib.Path = LIMITS) -> dict[str, Limit]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: Limit(**row) for name, row in rows.items()}


def over_limits(found: Iterable[Kernel], limits: Mapping[str, Limit]) -> list[str]:
    """Sentences about kernels over their row, kernels without one, and rows without a kernel."""
    findings, seen = [], set()
    for kernel in found:
        seen.add(kernel.name)
        limit = limits.get(kernel.name)
        if limit is None:
            findings.append(f"{kernel.name} has no row in limits.toml")
            continue
        for field in ("registers", "shared_bytes", "spill_bytes", "stack_bytes"):
            used, allowed = getattr(kernel, field), getattr(limit, field)
            if used > allowed:
                findings.append(
                    f"{kernel.name} on {kernel.arch}: {field} {used}, at most {allowed}"
                )
    return findings + [f"limits.toml: no kernel is {name}" for name in limits if name not in seen]


def missing_instructions(objects: Mapping[str, pathlib.Path]) -> list[str]:
    """Sentences about instructions that an object's machine code should have, and has not."""
    findings = []
    for source, wanted in INSTRUCTIONS.items():
        code = machine_code(objects[source])
        findings += [f"{source}: no {name} in its code" for name in wanted if name not in code]
    return findings


def find_cuobjdump() -> pathlib.Path | None:
    if found := shutil.which("cuobjdump"):
        return pathlib.Path(found)
    nvcc = build.find_nvcc()
    beside = [nvcc.resolve().with_name("cuobjdump")] if nvcc else []
    return next((path for path in (*build.in_wheels("cuobjdump"), *beside) if path.exists()), None)


def machine_code(path: pathlib.Path) -> str:
    """Disassembled. cuobjdump looks for nvdisasm in PATH; their wheels put them side by side."""
    program = find_cuobjdump()
    if program is None:
        raise build.BuildError(
            "no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        )
    done = subprocess.run(
        [str(program), "-sass", str(path)],
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": f"{program.parent}:/usr/bin:/bin"},
    )
    if done.returncode != 0:
        raise build.BuildError(f"cuobjdump {path.name}: {done.stderr}")
    return done.stdout


def table(found: Iterable[Kernel]) -> str:
    lines = [f"{'kernel':44} {'arch':7} {'registers':>9} {'spilled':>7} {'shared':>7}"]
    for kernel in sorted(found, key=lambda one: (one.name, one.arch)):
        lines.append(
            f"{kernel.name:44} {kernel.arch:7} {kernel.registers:9} {kernel.spill_bytes:7} "
            f"{kernel.shared_bytes:7}"
        )
    return "\n".join(lines)
