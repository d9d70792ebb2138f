"""Builds the CUDA kernels: `python -m csrc.cuda.build [--check] [--out PATH]`. Needs nvcc, no GPU.

A shared library of plain C for sm_80 and sm_90a, with the CUDA runtime inside, loadable anywhere.
`--check` holds every kernel to csrc/cuda/limits.toml and looks for tensor-core instructions.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "cuda"
INCLUDE = ROOT / "csrc" / "include"
LIBRARY = ROOT / "aserve" / "libaserve_cuda.so"
CACHE = ROOT / "build" / "cuda"

FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-Xptxas", "-v", "-Xcompiler", "-fPIC"]
FLAGS += ["--expt-relaxed-constexpr", "-lineinfo"]
# CUTLASS's two generations each run on one of them only.
ARCHITECTURES = {"gemm_sm80.cu": ("80",), "gemm_sm90.cu": ("90a",)}
ALL_ARCHITECTURES = ("80", "90a")
# By how long they take, so that the long ones start first.
SLOWEST_FIRST = ("attention.cu", "gemm_sm90.cu", "gemm_sm80.cu")


class BuildError(Exception):
    """What is missing, or what nvcc said."""


@dataclasses.dataclass(frozen=True)
class Tools:
    nvcc: pathlib.Path
    cutlass: pathlib.Path  # the folder with include/ in it


@dataclasses.dataclass(frozen=True)
class Object:
    source: str
    path: pathlib.Path
    log: str  # of ptxas -v
    seconds: float  # 0: it was there


def find_nvcc() -> pathlib.Path | None:
    """That of CUDA_HOME, of PATH, or of the wheel nvidia-cuda-nvcc."""
    if home := os.environ.get("CUDA_HOME"):
        return pathlib.Path(home) / "bin" / "nvcc"
    if found := shutil.which("nvcc"):
        return pathlib.Path(found)
    return next((path for path in in_wheels("nvcc") if path.exists()), None)


def in_wheels(program: str) -> list[pathlib.Path]:
    """Where NVIDIA's wheels of the CUDA toolkit put their programs."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(
        path for folder in folders for path in pathlib.Path(folder).glob(f"*/bin/{program}")
    )


def find_cutlass() -> pathlib.Path | None:
    """CUTLASS_PATH, or the wheel nvidia-cutlass."""
    if path := os.environ.get("CUTLASS_PATH"):
        return pathlib.Path(path)
    spec = importlib.util.find_spec("cutlass_library")
    if spec is None or spec.origin is None:
        return None
    return pathlib.Path(spec.origin).parent / "source"


def find_tools() -> Tools:
    nvcc, cutlass = find_nvcc(), find_cutlass()
    if nvcc is None:
        raise BuildError("no nvcc: set CUDA_HOME, or install nvidia-cuda-nvcc")
    if cutlass is None or not (cutlass / "include" / "cutlass").is_dir():
        raise BuildError("no CUTLASS headers: pip install --no-deps nvidia-cutlass==4.2.0.0")
    return Tools(nvcc, cutlass)


def sources() -> list[str]:
    names = sorted(path.name for path in SOURCES.glob("*.cu"))
    return sorted(names, key=lambda name: (name not in SLOWEST_FIRST, name))


def command(tools: Tools, source: str) -> list[str]:
    """Without the output."""
    compiled = [str(tools.nvcc), *FLAGS, f"-I{INCLUDE}", "-c", str(SOURCES / source)]
    for name in ("include", "tools/util/include"):
        compiled += ["-isystem", str(tools.cutlass / name)]
    for arch in ARCHITECTURES.get(source, ALL_ARCHITECTURES):
        compiled.append(f"-gencode=arch=compute_{arch},code=sm_{arch}")
    return compiled


def included(path: pathlib.Path, known: dict[pathlib.Path, bytes]) -> dict[pathlib.Path, bytes]:
    """The file and those of ours that it includes, with their contents."""
    if path not in known:
        known[path] = path.read_bytes()
        for name in re.findall(rb'^#include "([^"]+)"', known[path], re.MULTILINE):
            for folder in (path.parent, INCLUDE):
                if (folder / name.decode()).exists():
                    included(folder / name.decode(), known)
                    break
    return known


def version_of(tools: Tools) -> str:
    asked = [str(tools.nvcc), "--version"]
    return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def cache_place(tools: Tools, version: str, source: str) -> pathlib.Path:
    """Without a suffix. Named by contents: of the source, of what it includes, of the command."""
    digest = hashlib.sha256("\0".join([version, *command(tools, source)]).encode())
    for path, content in sorted(included(SOURCES / source, {}).items()):
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    return CACHE / f"{source.removesuffix('.cu')}-{digest.hexdigest()[:24]}"


def cached(tools: Tools, version: str, source: str) -> Object | None:
    place = cache_place(tools, version, source)
    made, log = place.with_suffix(".o"), place.with_suffix(".log")
    if not (made.exists() and log.exists()):
        return None
    return Object(source, made, log.read_text(encoding="utf-8"), 0.0)


def compile_one(tools: Tools, version: str, source: str) -> Object:
    """By nvcc, unless the cache has it."""
    if found := cached(tools, version, source):
        return found
    begun = time.monotonic()
    place = cache_place(tools, version, source)
    partial = place.with_suffix(f".{os.getpid()}.o")
    done = subprocess.run(
        [*command(tools, source), "-o", str(partial)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise BuildError(f"nvcc {source}:\n{done.stdout}{done.stderr}")
    log = done.stderr + done.stdout
    place.with_suffix(".log").write_text(log, encoding="utf-8")
    partial.replace(place.with_suffix(".o"))
    return Object(source, place.with_suffix(".o"), log, time.monotonic() - begun)


def build(tools: Tools, library: pathlib.Path = LIBRARY) -> list[Object]:
    """Compiles what changed, side by side, and links; raises BuildError."""
    CACHE.mkdir(parents=True, exist_ok=True)
    version = version_of(tools)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        made = list(pool.map(lambda source: compile_one(tools, version, source), sources()))
    link = [str(tools.nvcc), "-shared", "-cudart", "static", "-o", f"{library}.new"]
    link += ["-Xlinker", f"--version-script={SOURCES / 'exports.map'}"]
    link += [str(one.path) for one in made]
    done = subprocess.run(link, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"nvcc -shared:\n{done.stdout}{done.stderr}")
    os.replace(f"{library}.new", library)  # a process that has the old one open keeps it
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="hold kernels to their limits")
    parser.add_argument("--out", type=pathlib.Path, default=LIBRARY)
    options = parser.parse_args()
    from csrc.cuda import report

    try:
        made = build(find_tools(), options.out)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for one in made:
        print(f"{one.source:16} " + (f"{one.seconds:6.1f} s" if one.seconds else "unchanged"))
    if not options.check:
        return 0
    kernels = [kernel for one in made for kernel in report.kernels(one.log)]
    findings = report.over_limits(kernels, report.read_limits())
    findings += report.missing_instructions({one.source: one.path for one in made})
    print(report.table(kernels))
    print("\n".join(findings), file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
