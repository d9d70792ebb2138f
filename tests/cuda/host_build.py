"""The CUDA kernels compiled for the host; threads take turns (aserve/host_block.cuh)."""

import concurrent.futures
import ctypes
import hashlib
import os
import pathlib
import subprocess

from csrc.cuda import build
from tests import tree

# CUTLASS runs on a GPU alone; a plain product stands in for it.
ON_GPU_ONLY = ("gemm.cu", "gemm_sm80.cu", "gemm_sm90.cu")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", f"-I{build.INCLUDE}"]
CACHE = tree.ROOT / "build" / "cuda-host"


def sources() -> list[pathlib.Path]:
    ours = [build.SOURCES / name for name in build.sources() if name not in ON_GPU_ONLY]
    return [*ours, pathlib.Path(__file__).with_name("host_gemm.cpp")]


def compile_one(source: pathlib.Path) -> pathlib.Path:
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path, content in sorted(build.included(source, {}).items()):
        digest.update(f"\0{path.name}\0{len(content)}\0".encode() + content)
    made = CACHE / f"{source.stem}-{digest.hexdigest()[:24]}.o"
    if not made.exists():
        partial = made.with_suffix(f".{os.getpid()}.o")
        command = [os.environ.get("CXX", "g++"), *FLAGS, "-x", "c++", "-c", str(source)]
        subprocess.run([*command, "-o", str(partial)], check=True)
        partial.replace(made)
    return made


def build_host_library(library: pathlib.Path) -> pathlib.Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sources()))
    link = [os.environ.get("CXX", "g++"), "-shared", "-o", str(library)]
    subprocess.run([*link, *map(str, objects)], check=True)
    return library


def turn_round(library: pathlib.Path, backwards: bool) -> None:
    """Threads and blocks of kernels take turns from the last to the first."""
    ctypes.CDLL(str(library)).aserve_host_backwards(int(backwards))
