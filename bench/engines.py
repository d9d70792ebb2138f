"""The engines compared: each started in a process of its own, and stopped when its block ends.

aserve and llama.cpp are servers, driven over HTTP by the client of `aserve bench serve`;
transformers is a worker that answers lines of JSON.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator

import trio

from aserve.bench.client import Connection, Target
from aserve.bench.serve import Server, drive, first_model, fit_words
from aserve.bench.workload import Ask, Fit, Prompts, Span, draw_workload

START_S = 120.0
LLAMA_CPP = "llama-cpp-python[server]"
# This machine's own vector units but AMX, whose path crashes on Q4_1 weights.
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LLAMA_BUILD = {"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CFLAGS": NO_AMX, "CXXFLAGS": NO_AMX}


@dataclasses.dataclass(frozen=True)
class Load:
    """`streams` requests at once, each `prompt_len` tokens in and `output_len` out."""

    streams: int
    prompt_len: int
    output_len: int


class HttpEngine:
    """A server under test. `measure` returns seconds and the prompt and output tokens it saw."""

    def __init__(self, name: str, pid: int, server: Server, fit: Fit | None = None) -> None:
        self.name = name
        self.pid = pid
        self.server = server
        self.fit = trio.run(self._fit) if fit is None else fit
        self._seed = 0

    async def _fit(self) -> Fit:
        return await fit_words(self.server, self._prompts(1, Fit()))

    def _prompts(self, prompt_len: int, fit: Fit) -> Prompts:
        span = Span(prompt_len, prompt_len)
        return Prompts("words", span, shared_share=0.0, vocab=0, fit=fit)

    def measure(self, load: Load) -> tuple[float, int, int]:
        self._seed += 1  # every prompt is new: the prefix cache has no part in this
        asks = draw_workload(
            self._prompts(load.prompt_len, self.fit),
            Span(load.output_len, load.output_len),
            n_requests=load.streams,
            rate_per_s=None,
            seed=self._seed,
        )
        return trio.run(self._drive, asks)

    async def _drive(self, asks: list[Ask]) -> tuple[float, int, int]:
        started_s = time.perf_counter()
        seen = await drive(self.server, asks, None)
        errors = [one.error for one in seen if one.error]
        if errors:
            raise RuntimeError(f"{self.name}: {errors[0]}")
        # A single token is the prefill's: its time is the whole request's, close included.
        seconds = time.perf_counter() - started_s
        prompt_len = sum(one.prompt_tokens for one in seen)
        return seconds, prompt_len, sum(one.completion_tokens for one in seen)


class LineEngine:
    """A worker process that is asked in lines of JSON."""

    def __init__(self, name: str, process: "subprocess.Popen[str]") -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    def measure(self, load: Load) -> tuple[float, int, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(load)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name}: the worker died")
        seconds = float(json.loads(answer)["seconds"])
        return seconds, load.streams * load.prompt_len, load.streams * load.output_len


Engine = HttpEngine | LineEngine


@contextlib.contextmanager
def child(*command: str, **options: object) -> Iterator["subprocess.Popen[str]"]:
    """A process that is asked to end, then made to, when the block is left."""
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def aserve_server(model: str, *flags: str) -> Iterator[HttpEngine]:
    """`aserve serve` on a free port; ready when its line says so."""
    command = (sys.executable, "-m", "aserve", "serve", model, "--port", "0", *flags)
    quiet = ("--server.log_level", "error")
    with child(*command, *quiet, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving (\S+) at (http://\S+)", line):
                break
        else:
            raise RuntimeError(f"aserve did not start:\n{said}")
        server = Server(Target.parse(found[2]), found[1], extra={"ignore_eos": True})
        yield HttpEngine("aserve", process.pid, server)


@contextlib.contextmanager
def transformers_worker(model: str, threads: int) -> Iterator[LineEngine]:
    command = (sys.executable, "-m", "bench.transformers_worker", model, str(threads))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with child(*command, env=_threads_env(threads), **pipes) as process:
        yield LineEngine("transformers", process)


def peers_folder() -> pathlib.Path:
    """Where peers' own environments live: the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "aserve" / "peers"


def llama_cpp_python() -> pathlib.Path:
    """The interpreter of llama.cpp's environment; made on first use, which compiles for minutes."""
    folder = peers_folder() / "llama-cpp"
    python = folder / "bin" / "python"
    stamp = folder / "complete"
    if not stamp.exists():
        print(f"building {LLAMA_CPP} in {folder}; this takes minutes", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install = (python, "-m", "pip", "install", "--quiet", LLAMA_CPP)
        build = os.environ | LLAMA_BUILD
        subprocess.run([*map(str, install)], check=True, env=build)
        stamp.touch()
    return python


@contextlib.contextmanager
def llama_cpp_server(model: str, threads: int, fit: Fit) -> Iterator[HttpEngine]:
    """llama-cpp-python's server on the same GGUF; it has no ignore_eos, a bias holds EOS back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(llama_cpp_python()), "-m", "llama_cpp.server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--n_ctx", "4096"]
    # Its default drops a stream that runs when another request comes.
    command += ["--interrupt_requests", "False"]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with child(*command, env=_threads_env(threads), **quiet) as process:
        target = Target.parse(f"http://127.0.0.1:{port}")
        name = trio.run(_wait_model, target)
        extra: dict[str, object] = {"logit_bias": {"2": -100.0}}
        yield HttpEngine("llama.cpp", process.pid, Server(target, name, extra=extra), fit)


async def _wait_model(target: Target) -> str:
    with trio.fail_after(START_S):
        while True:
            with contextlib.suppress(OSError):
                return await first_model(target, None)
            await trio.sleep(0.2)


def _threads_env(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads)}


def metrics(engine: HttpEngine) -> dict[str, float]:
    """The server's Prometheus samples without labels."""
    return trio.run(_metrics, engine.server.target)


async def _metrics(target: Target) -> dict[str, float]:
    connection = Connection(target)
    await connection.send("GET", "/metrics")
    body = b""
    while piece := await connection.read():
        body += piece
    await connection.aclose()
    found = re.findall(r"^(\w+) (\S+)$", body.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}
