"""Ranks that a launcher started: two processes on loopback, by its variables and by torchrun."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import httpx
import pytest

from aserve.actors.cluster import berth_of, follows
from aserve.actors.engine import open_engine
from aserve.actors.following import check_same, shared
from aserve.core.config import Cache, Config, Layout, Model, Ranks, Server
from aserve.errors import ConfigError, PeerError

LIMIT_S = 120.0
ASK = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}
CLUSTER = Config(layout=Layout(tp=2), ranks=Ranks(live="cluster"))


def variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ASERVE_PORT": str(port + 1),
    }


def test_only_ranks_other_than_0_follow() -> None:
    assert not follows(Config(), {})
    assert not follows(CLUSTER, variables(0, 2, 1))
    assert follows(CLUSTER, variables(1, 2, 1))


def test_a_world_that_is_not_the_layouts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torchrun runs 3 processes, the layout needs .* = 2"):
        berth_of(CLUSTER, variables(0, 3, 1))


async def test_only_rank_0_has_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="rank 1 of 2, and only rank 0"):
        async with open_engine(config=CLUSTER):
            pytest.fail("it opened")


def test_what_only_one_rank_reads_may_differ_and_the_rest_is_named() -> None:
    other = Config(
        model=Model(path="elsewhere"),
        layout=CLUSTER.layout,
        ranks=Ranks(live="cluster", start_s=1),
        cache=Cache(kv_mib_max=7),
        server=Server(port=1),
    )
    check_same(other, CLUSTER)
    assert shared(other) == shared(CLUSTER)
    other = Config(layout=Layout(tp=2, numerics="fast"), cache=Cache(page_size=32))
    with pytest.raises(PeerError) as caught:
        check_same(other, CLUSTER)
    assert "layout.numerics is 'fast' here, 'exact' there" in str(caught.value)
    assert "cache.page_size is 32 here, 16 there" in str(caught.value)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


class Launched:
    """Two processes with a launcher's variables; rank 0's URL."""

    def __init__(self, path: pathlib.Path, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        self._port = free_port() & ~1
        self._command = [sys.executable, "-W", "error", "-m", "aserve", "serve", str(path)]
        self._command += ["--ranks", "cluster", "--port", self.url.rsplit(":", 1)[1], *flags]
        self._command += ["--cache.kv_tokens", "4096", "--compute.threads", "1"]
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, *flags: str) -> None:
        self.processes[rank] = subprocess.Popen(
            [*self._command, *flags],
            env={**os.environ, **variables(rank, 2, self._port)},
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self, wanted: int = 200) -> None:
        wait_ready(self.url, self.processes, wanted)

    def say(self) -> str:
        answer = httpx.post(f"{self.url}/v1/completions", json=ASK, timeout=LIMIT_S)
        text: str = answer.json()["choices"][0]["text"]
        return text

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


def wait_ready(
    url: str, processes: Mapping[int, "subprocess.Popen[str]"], wanted: int = 200
) -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        for rank, process in processes.items():
            assert process.poll() is None, (rank, process.communicate())
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=LIMIT_S).status_code == wanted:
                return
        time.sleep(0.05)
    pytest.fail("it is not ready")


@contextlib.contextmanager
def launched(path: pathlib.Path, *flags: str) -> Iterator[Launched]:
    made = Launched(path, *flags)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def right(tiny_model_path: pathlib.Path) -> str:
    """What one rank says."""
    from aserve import LLM, SamplingParams

    with LLM(tiny_model_path, cache__kv_tokens=4096, compute__threads=1) as llm:
        params = SamplingParams(max_tokens=40, seed=3, ignore_eos=True)
        [done] = llm.generate(str(ASK["prompt"]), params)
    return done.text


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_two_processes_serve_and_end_together(
    tiny_model_path: pathlib.Path, right: str, axis: str
) -> None:
    with launched(tiny_model_path, f"--layout.{axis}", "2") as two:
        for rank in (1, 0):
            two.start(rank)
        two.wait_ready()
        assert two.say() == right
        two.processes[0].send_signal(signal.SIGTERM)
        for rank in (0, 1):
            _, said = two.processes[rank].communicate(timeout=30)
            assert two.processes[rank].returncode == 0, (rank, said)
            assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_rank_that_has_nobody_to_wait_for(
    tiny_model_path: pathlib.Path, number: signal.Signals
) -> None:
    """Only a rank that serves lets requests end first: this one has not even found rank 0."""
    with launched(tiny_model_path, "--layout.tp", "2") as two:
        two.start(1)
        process = two.processes[1]
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "rank 1 of 2: joining rank 0 at tcp:127.0.0.1:" in line
        process.send_signal(number)
        _, said = process.communicate(timeout=10)
        assert process.returncode == 128 + number
        assert said == f"aserve: ended by {number.name}\n"


@pytest.mark.slow
def test_a_rank_that_is_started_again_takes_its_place(
    tiny_model_path: pathlib.Path, right: str
) -> None:
    with launched(tiny_model_path, "--layout.pp", "2") as two:
        for rank in (0, 1):
            two.start(rank)
        two.wait_ready()
        killed = two.processes.pop(1)
        killed.kill()
        killed.communicate()
        two.wait_ready(503)
        two.start(1)
        two.wait_ready()
        assert two.say() == right


@pytest.mark.slow
def test_ranks_of_different_configurations_say_what_differs(
    tiny_model_path: pathlib.Path,
) -> None:
    with launched(tiny_model_path, "--layout.tp", "2") as two:
        two.start(0)
        two.start(1, "--layout.numerics", "fast")
        _, said = two.processes[0].communicate(timeout=LIMIT_S)
        assert two.processes[0].returncode == 1
        assert "layout.numerics is 'fast' here, 'exact' there" in said
        assert "rank 1" in said


@pytest.mark.slow
def test_torchrun_starts_two_nodes(tiny_model_path: pathlib.Path, right: str) -> None:
    """As conf/torchrun.toml says."""
    store, requests, http = free_port(), free_port(), free_port()
    flags = ["--ranks", "cluster", "--layout.tp", "2", "--port", str(http)]
    flags += ["--cache.kv_tokens", "4096", "--compute.threads", "1"]
    nodes: dict[int, subprocess.Popen[str]] = {}
    try:
        for node in range(2):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", "1", "--node-rank", str(node)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(store)]
            command += ["-m", "aserve", "serve", str(tiny_model_path), *flags]
            environment = {**os.environ, "ASERVE_PORT": str(requests), "OMP_NUM_THREADS": "1"}
            nodes[node] = subprocess.Popen(
                command, env=environment, stderr=subprocess.PIPE, text=True
            )
        url = f"http://127.0.0.1:{http}"
        wait_ready(url, nodes)
        answer = httpx.post(f"{url}/v1/completions", json=ASK, timeout=LIMIT_S)
        assert answer.json()["choices"][0]["text"] == right
        nodes[0].send_signal(signal.SIGTERM)
        for node in (0, 1):
            nodes[node].communicate(timeout=60)
    finally:
        for process in nodes.values():
            process.kill()
            process.communicate()
