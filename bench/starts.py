"""How each engine is started for a comparison, and in which variants it takes part.

A peer's figure in a row is that of its best variant there, so none is held back by a choice of
ours; aserve's variants stand for themselves.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

import trio

from aserve.bench.client import Target
from aserve.bench.serve import Server, first_model
from bench import install, weights
from bench.engines import Engine, EngineError, HttpEngine, LineEngine
from bench.install import Say
from bench.processes import child

# Enough for 32 streams of 256 tokens twice over; every engine that can be told is told the same.
KV_TOKENS = 16384
CONTEXT_LEN = 4096
STREAMS_MAX = 32
START_S = {"llamacpp": 60.0, "vllm": 900.0}
OPENVINO_KINDS = ("fp16", "int8", "int4")
PEERS = ("llamacpp", "openvino", "vllm", "transformers")
OURS = "aserve"
GREEDY: dict[str, object] = {"temperature": 0.0, "ignore_eos": True}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all engines of a run have in common."""

    model: pathlib.Path  # a GGUF file, or a folder of safetensors
    threads: int
    vocab: int
    weights: tuple[str, ...] = ()  # of aserve: values of --weights; none: its default alone
    say: Say = print


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of running an engine. `open` starts it for the length of a block."""

    peer: str
    option: str
    open: Callable[[Setting], contextlib.AbstractContextManager["Started"]]

    @property
    def name(self) -> str:
        return f"{self.peer} {self.option}".strip()


@dataclasses.dataclass(frozen=True)
class Started:
    engine: Engine
    version: str
    command: tuple[str, ...]


def variants(peers: list[str], setting: Setting) -> list[Variant]:
    """aserve first, then the peers' in the order asked for."""
    found = [Variant(OURS, name, _aserve_of(name)) for name in setting.weights or ("",)]
    threads = sorted({1, setting.threads})
    options: dict[str, list[tuple[str, Callable[..., object]]]] = {
        "llamacpp": [(f"t{n}", _llamacpp_of(n)) for n in threads],
        "openvino": [(kind, _openvino_of(kind)) for kind in OPENVINO_KINDS],
        "vllm": [("bf16", vllm_server)],
        "transformers": [("bf16", transformers_worker)],
    }
    for peer in peers:
        found += [Variant(peer, option, start) for option, start in options[peer]]  # type: ignore[arg-type]
    return found


@contextlib.contextmanager
def aserve_server(model: str, *flags: str, vocab: int = 300) -> Iterator[HttpEngine]:
    """`aserve serve` on a free port; ready when its line says so."""
    command = (sys.executable, "-m", "aserve", "serve", model, "--port", "0", *flags)
    quiet = ("--server.log_level", "error")
    with child((*command, *quiet), stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if found := re.search(r"serving (\S+) at (http://\S+)", line):
                break
        else:
            raise EngineError(f"aserve did not start:\n{said}")
        server = Server(Target.parse(found[2]), found[1], extra=GREEDY)
        yield HttpEngine(OURS, process.pid, server, vocab)


def _aserve_of(
    weight_type: str,
) -> Callable[[Setting], contextlib.AbstractContextManager[Started]]:
    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Started]:
        flags = ["--compute.threads", str(setting.threads), "--cache.kv_tokens", str(KV_TOKENS)]
        flags += ["--weights", weight_type] if weight_type else []
        with aserve_server(str(setting.model), *flags, vocab=setting.vocab) as engine:
            engine.name = f"{OURS} {weight_type}".strip()
            yield Started(engine, _own_version(), ("aserve", "serve", setting.model.name, *flags))

    return start


def _own_version() -> str:
    """The version, and the commit where there is a repository."""
    from aserve import __version__

    here = pathlib.Path(__file__).parent
    ask = ("git", "-C", str(here), "rev-parse", "--short", "HEAD")
    with contextlib.suppress(OSError):
        said = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
        return f"aserve {__version__} {said}".strip()
    return f"aserve {__version__}"


def _llamacpp_of(
    threads: int,
) -> Callable[[Setting], contextlib.AbstractContextManager[Started]]:
    """llama.cpp's server with as many slots as streams, sharing one KV cache; a thread less is
    faster for it where cores are few, hence the number."""

    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Started]:
        if setting.model.is_dir():
            raise EngineError("llama.cpp reads GGUF files, not folders")
        binary = install.llama_server(install.ready("llamacpp", setting.say))
        flags = ["-m", str(setting.model), "-t", str(threads), "-tb", str(threads)]
        flags += ["-np", str(STREAMS_MAX), "-c", str(KV_TOKENS), "--kv-unified", "--cont-batching"]
        flags += ["-b", "2048", "-ub", "512", "--no-webui", "--cache-ram", "0", "-fa", "on"]
        extra: dict[str, object] = GREEDY | {"cache_prompt": False}
        with _http(f"llamacpp t{threads}", [binary, *flags], {}, extra, setting) as engine:
            yield Started(engine, install.versions("llamacpp"), ("llama-server", *flags[2:]))

    return start


def _openvino_of(
    kind: str,
) -> Callable[[Setting], contextlib.AbstractContextManager[Started]]:
    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Started]:
        python = install.python_of(install.ready("openvino", setting.say))
        folder = weights.safetensors(setting.model, setting.say)
        folder = weights.openvino(folder, kind, setting.say)
        worker = str(pathlib.Path(__file__).with_name("openvino_worker.py"))
        numbers = (setting.threads, KV_TOKENS, setting.vocab)
        command = (python, worker, str(folder), *map(str, numbers))
        with _lines(f"openvino {kind}", command, setting) as engine:
            shown = ("openvino_worker.py", folder.name, *map(str, numbers))
            yield Started(engine, install.versions("openvino"), shown)

    return start


@contextlib.contextmanager
def vllm_server(setting: Setting) -> Iterator[Started]:
    """vLLM's server on processors; the first start compiles for minutes, later ones less."""
    environment = install.ready("vllm", setting.say)
    folder = weights.safetensors(setting.model, setting.say)
    cores = sorted(os.sched_getaffinity(0))[: setting.threads]
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # whole GiB: the least it takes, 45,000 tokens
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(install.peers_folder() / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    # `vllm serve` looks for a package called vllm, which the build for processors is not.
    server = ["-m", "vllm.entrypoints.openai.api_server"]
    flags = ["--model", str(folder), "--dtype", "bfloat16", "--max-model-len", str(CONTEXT_LEN)]
    flags += ["--max-num-seqs", str(STREAMS_MAX), "--no-enable-prefix-caching"]
    command = [install.python_of(environment), *server, *flags]
    with _http("vllm bf16", command, variables, GREEDY, setting) as engine:
        chosen = [f"{name}={variables[name]}" for name in list(variables)[:2]]
        yield Started(engine, install.versions("vllm"), (*chosen, "python", *server, *flags[2:]))


@contextlib.contextmanager
def transformers_worker(setting: Setting) -> Iterator[Started]:
    from importlib.metadata import version

    folder = weights.safetensors(setting.model, setting.say)
    command = (sys.executable, "-m", "bench.transformers_worker", str(folder))
    with _lines("transformers bf16", (*command, str(setting.threads)), setting) as engine:
        shown = ("transformers_worker.py", folder.name, str(setting.threads))
        yield Started(engine, f"transformers {version('transformers')}", shown)


@contextlib.contextmanager
def _lines(name: str, command: tuple[str, ...], setting: Setting) -> Iterator[LineEngine]:
    with _log_of(name).open("w") as log:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with child(command, env=_threads_env(setting.threads), **pipes) as process:
            try:
                engine = LineEngine(name, process)
            except EngineError as error:
                raise EngineError(f"{error}\n{_said(name)}") from error
            yield engine


@contextlib.contextmanager
def _http(
    name: str,
    command: list[str],
    variables: Mapping[str, str],
    extra: dict[str, object],
    setting: Setting,
) -> Iterator[HttpEngine]:
    """A server on a free port of the loopback address; ready when it lists its model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    environment = _threads_env(setting.threads) | variables
    with _log_of(name).open("w") as log:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        with child([*command, *address], env=environment, **quiet) as process:
            target = Target.parse(f"http://127.0.0.1:{port}")
            model = trio.run(_wait_model, target, process, name)
            server = Server(target, model, extra=extra)
            yield HttpEngine(name, process.pid, server, setting.vocab)


async def _wait_model(target: Target, process: "subprocess.Popen[str]", name: str) -> str:
    with trio.move_on_after(START_S[name.split()[0]]):
        while process.poll() is None:
            with contextlib.suppress(OSError):
                return await first_model(target, None)
            await trio.sleep(0.5)
    how = "did not start in time" if process.poll() is None else "ended while starting"
    raise EngineError(f"{name} {how}\n{_said(name)}")


def _log_of(name: str) -> pathlib.Path:
    install.peers_folder().mkdir(parents=True, exist_ok=True)
    return install.peers_folder() / f"{name.replace(' ', '-')}.run.log"


def _said(name: str) -> str:
    text = _log_of(name).read_text(encoding="utf-8", errors="replace")
    return "  " + "\n  ".join(text.splitlines()[-install.LOG_LINES :])


def _threads_env(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads)}
