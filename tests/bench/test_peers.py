"""Interleaving with engines of our own, processes as they are, and a real server's token counts."""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from aserve.bench.measured import Seen
from aserve.testing.tiny import write_tiny_model
from bench import loads, peers, processes, record, starts
from bench.engines import EngineError, LineEngine, measured
from bench.install import InstallError
from bench.loads import Load, Measured
from bench.starts import Setting, Started, Variant

SETTING = Setting(pathlib.Path("model.gguf"), threads=2, vocab=300)
SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


class Scripted:
    """Gives the seconds it was made with; `log` is shared, so that turns can be seen."""

    def __init__(self, name: str, pid: int, seconds: float, log: list[str]) -> None:
        self.name, self.pid, self.seconds, self.log = name, pid, seconds, log
        self.fails_at: Load | None = None

    def measure(self, load: Load) -> Measured:
        if load == self.fails_at:
            raise EngineError("out of memory")
        if load != loads.WARM_UP:
            self.log.append(self.name)
        tokens = load.streams * load.prompt_len, load.streams * load.output_len
        return Measured(self.seconds, self.seconds / 2, *tokens)


def variant(engine: Scripted) -> Variant:
    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Started]:
        yield Started(engine, "1.0", (engine.name,))  # type: ignore[arg-type]

    peer, _, option = engine.name.partition(" ")
    return Variant(peer, option, start)


@pytest.fixture
def pid() -> Iterator[int]:
    with processes.child(SLEEP) as process:
        yield process.pid


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "IDLE_S", 0.0)
    monkeypatch.setattr(loads, "REPEATS", {"prefill": 1, "ttft": 1, "decode": 1})
    monkeypatch.setattr(peers, "REPEATS", {"prefill": 1, "ttft": 1, "decode": 1})


def compare(engines: list[Scripted], rounds: int, file: pathlib.Path) -> record.Record:
    rows = loads.rows_of([1, 8])
    found = record.load(file, {"threads": 2})
    comparison = peers.Comparison(found, rows, rounds, file)
    with contextlib.ExitStack() as stack:
        for engine in engines:
            comparison.start(stack, variant(engine), SETTING, again=False)
        comparison.run()
    return found


def test_engines_take_turns_row_by_row(tmp_path: pathlib.Path, pid: int) -> None:
    log: list[str] = []
    both = [Scripted(name, pid, 1.0, log) for name in ("aserve", "vllm bf16")]
    found = compare(both, 2, tmp_path / "peers.json")
    assert log == ["aserve", "vllm bf16"] * 5 * 2
    samples = found["engines"]["aserve"]["samples"]
    assert samples["decode_8"] == [1024.0, 1024.0]
    assert samples["prefill_512"] == [512.0, 512.0]
    assert samples["ttft_128"] == [500.0, 500.0]
    assert len(samples["rss_mb"]) == 2
    assert min(samples["rss_mb"]) > 1


def test_a_second_run_measures_only_what_the_file_lacks(tmp_path: pathlib.Path, pid: int) -> None:
    file, log = tmp_path / "peers.json", list[str]()
    compare([Scripted("aserve", pid, 1.0, log)], 1, file)
    log.clear()
    found = compare([Scripted(name, pid, 2.0, log) for name in ("aserve", "vllm bf16")], 1, file)
    assert log == ["vllm bf16"] * 5
    assert found["engines"]["aserve"]["samples"]["decode_1"] == [128.0]
    assert found["engines"]["vllm bf16"]["samples"]["decode_1"] == [64.0]


def test_a_hopeless_variant_sits_out_later_rounds(tmp_path: pathlib.Path, pid: int) -> None:
    log: list[str] = []
    both = [Scripted(f"openvino {n}", pid, s, log) for n, s in (("int4", 1.0), ("fp16", 2.0))]
    found = compare(both, 3, tmp_path / "peers.json")
    assert log.count("openvino int4") == 15
    assert log.count("openvino fp16") == 5
    assert record.summary(found, loads.rows_of([1, 8]))["openvino"]["decode_1"] == 128.0


def test_an_engine_that_fails_is_noted_and_the_others_go_on(
    tmp_path: pathlib.Path, pid: int
) -> None:
    log: list[str] = []
    ours, theirs = (Scripted(name, pid, 1.0, log) for name in ("aserve", "vllm bf16"))
    theirs.fails_at = loads.rows_of([1, 8])[1].load
    found = compare([ours, theirs], 1, tmp_path / "peers.json")
    assert found["engines"]["vllm bf16"]["failed"] == "in decode_8: out of memory"
    assert found["engines"]["vllm bf16"]["samples"] == {"decode_1": [128.0]}
    assert len(found["engines"]["aserve"]["samples"]) == 6


def test_a_peer_that_cannot_be_had_is_noted(tmp_path: pathlib.Path) -> None:
    @contextlib.contextmanager
    def start(setting: Setting) -> Iterator[Started]:
        raise InstallError("no wheel for this system")
        yield

    found = record.new({})
    comparison = peers.Comparison(found, loads.rows_of([1]), 1, None)
    with contextlib.ExitStack() as stack:
        comparison.start(stack, Variant("vllm", "bf16", start), SETTING, again=False)
        comparison.run()
    told = record.summary(found, loads.rows_of([1]))
    assert told["vllm"]["error"] == "no wheel for this system"
    assert told["vllm"]["decode_1"] is None


def seen(prompt: int, completion: int, cached: int = 0) -> Seen:
    return Seen(1.0, [1.5, 3.0], 3.25, prompt, completion, cached)


def test_a_measurement_spans_all_requests() -> None:
    late = Seen(1.5, [3.5, 4.0], 4.5, 16, 2)
    got = measured("x", Load(2, 16, 2), [seen(16, 2), late])
    assert got == Measured(3.5, 1.25, 32, 4)


def test_other_than_the_tokens_asked_for_is_an_error() -> None:
    with pytest.raises(EngineError, match="asked for"):
        measured("x", Load(1, 16, 4), [seen(16, 3)])
    with pytest.raises(EngineError, match="asked for"):
        measured("x", Load(1, 16, 2), [seen(15, 2)])
    with pytest.raises(EngineError, match="were cached"):
        measured("x", Load(1, 16, 2), [seen(16, 2, cached=12)])
    failed = Seen(1.0, error="status 500")
    with pytest.raises(EngineError, match="status 500"):
        measured("x", Load(1, 16, 2), [failed])


WORKER = """
import json, sys
print("a library says hello")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    load = json.loads(line)
    print(json.dumps({"seconds": 2.0, "ttft_s": 0.5,
        "prompt_tokens": load["streams"] * load["prompt_len"],
        "output_tokens": load["streams"] * min(load["output_len"], 8)}), flush=True)
"""


def test_a_worker_answers_in_lines_and_is_held_to_its_counts() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with processes.child((sys.executable, "-c", WORKER), **pipes) as process:
        engine = LineEngine("w", process)
        assert engine.measure(Load(2, 16, 8)) == Measured(2.0, 0.5, 32, 16)
        with pytest.raises(EngineError, match="asked for"):
            engine.measure(Load(2, 16, 9))
        process.kill()
        process.wait()
    with (
        processes.child((sys.executable, "-c", ""), **pipes) as process,
        pytest.raises(EngineError, match="died"),
    ):
        LineEngine("w", process)


def state(pid: int) -> str:
    text = (processes.PROC / str(pid) / "stat").read_text(encoding="utf-8")
    return text.rpartition(")")[2].split()[0]


def wait_until(is_so: object) -> None:
    end_s = time.monotonic() + 10
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < end_s
        os.sched_yield()


@pytest.mark.slow
def test_a_tree_is_paused_resumed_and_ended_whole() -> None:
    script = f"import subprocess; subprocess.run({list(SLEEP)!r})"
    with processes.child((sys.executable, "-c", script)) as process:
        wait_until(lambda: len(processes.family(process.pid)) == 2)
        tree = processes.family(process.pid)
        processes.pause(process.pid)
        wait_until(lambda: [state(one) for one in tree] == ["T", "T"])
        processes.resume(process.pid)
        wait_until(lambda: "T" not in [state(one) for one in tree])
        processes.pause(process.pid)  # a paused tree ends all the same
    wait_until(lambda: not any((processes.PROC / str(one)).exists() for one in tree))


SMAPS = """\
00400000-00500000 r--p 00000000 fe:01 77     /model.gguf
Size:               1024 kB
Rss:                1000 kB
Anonymous:             0 kB
00600000-00700000 r--p 00000000 fe:01 77     /model.gguf
Size:               1024 kB
Rss:                 900 kB
Anonymous:             0 kB
00700000-00800000 rw-p 00100000 fe:01 77     /model.gguf
Size:               1024 kB
Rss:                 500 kB
Anonymous:           200 kB
7f000000-7f100000 rw-p 00000000 00:00 0      [heap]
Size:               4096 kB
Rss:                4096 kB
Anonymous:          4096 kB
"""


def test_a_page_of_a_file_counts_once_however_often_it_is_mapped() -> None:
    found = processes.mapped(SMAPS)
    assert sorted(found.values()) == [300, 1000]


@pytest.mark.slow
def test_memory_of_a_tree_covers_what_it_holds(pid: int) -> None:
    wait_until(lambda: processes.resident_bytes(pid) > 3 << 20)
    hold = f"x = bytearray(64 << 20); import subprocess; subprocess.run({list(SLEEP)!r})"
    with processes.child((sys.executable, "-c", hold)) as process:
        wait_until(lambda: processes.resident_bytes(process.pid) > 64 << 20)
        assert processes.resident_bytes(process.pid) < 160 << 20


def test_arguments_are_lists_with_commas() -> None:
    given = peers.parser().parse_args(["--peers", "vllm,llamacpp", "--streams", "1,8"])
    assert (given.peers, given.streams) == (["vllm", "llamacpp"], [1, 8])
    assert peers.parser().parse_args(["--peers", ""]).peers == []
    with pytest.raises(argparse.ArgumentTypeError, match="know llamacpp"):
        peers.peer_names("sglang")
    for wrong in ("", "x", "0"):
        with pytest.raises(argparse.ArgumentTypeError, match="counts"):
            peers.stream_counts(wrong)


def test_variants_are_ours_by_weight_type_and_the_peers_by_option() -> None:
    found = [one.name for one in starts.variants(["llamacpp", "openvino"], SETTING)]
    assert found == [
        "aserve",
        "llamacpp t1",
        "llamacpp t2",
        "openvino fp16",
        "openvino int8",
        "openvino int4",
    ]
    ours = Setting(SETTING.model, 1, 300, weights=("keep", "bf16"))
    found = [one.name for one in starts.variants(["llamacpp"], ours)]
    assert found == ["aserve keep", "aserve bf16", "llamacpp t1"]


@pytest.mark.slow
def test_a_real_server_gives_the_tokens_of_every_load(tmp_path: pathlib.Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    with starts.aserve_server(str(model), "--compute.threads", "1", vocab=380) as engine:
        for row in loads.rows_of([1, 4], 0.05):
            if row.kind == "rss":
                continue
            got = engine.measure(row.load)
            assert got.prompt_tokens == row.load.streams * row.load.prompt_len
            assert got.output_tokens == row.load.streams * row.load.output_len
            assert 0 < got.ttft_s <= got.seconds
        assert processes.resident_bytes(engine.pid) > 20e6
        assert processes.cpu_s(engine.pid) > 0
