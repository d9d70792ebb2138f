"""`bench.device_check`: its cases and timings over the host's kernels; what it says without."""

import dataclasses
import pathlib
import subprocess

import pytest
import torch

from aserve.tensor import cuda_library as abi
from aserve.tensor.cuda import CudaOps, open_cuda
from bench import device_cases, device_check, device_draws, device_timings, device_trees
from bench.device_cases import Heads
from csrc.cuda import build

SMALL = device_timings.Sizes(
    hidden=32, inner=48, heads=Heads(4, 2, 16), vocab=300, context=96, chunk=32, streams=(1, 3),
    copy_bytes=4096, square=16, repeats=1, turns_bytes=1,
)  # fmt: skip
CASES = device_cases.CASES | device_draws.CASES | device_trees.CASES
FEW = tuple(device_cases.CHUNKS[n] for n in (1, 2, 5))


@pytest.fixture
def small_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cases, "SHAPES", (Heads(3, 1, 40),))
    monkeypatch.setattr(device_cases, "DECODE", device_cases.DECODE[:2])
    monkeypatch.setattr(device_cases, "CHUNKS", FEW)


@pytest.mark.usefixtures("small_attention")
@pytest.mark.parametrize("name", CASES)
def test_each_case_passes_over_the_hosts_kernels(host_library: pathlib.Path, name: str) -> None:
    plain = open_cuda(host_library)
    ops = device_cases.PoisonedOps(plain.library, plain.device)
    found = device_cases.compare(ops, CASES[name], 1)
    assert found.passed, found


class Wrong(CudaOps):
    """Whatever a kernel leaves in its last output row is gone."""

    def call(self, name: str, *arguments: object) -> None:
        if name not in ("silu_mul", "attention", "draw", "kv_gather"):
            super().call(name, *arguments)


@pytest.mark.usefixtures("small_attention")
@pytest.mark.parametrize(
    "name", ["add, silu_mul, embed", "attention", "draw", "kv_append, gather, move"]
)
def test_a_kernel_that_writes_nothing_fails_its_case(host_library: pathlib.Path, name: str) -> None:
    class Poisoned(Wrong, device_cases.PoisonedOps):
        pass

    plain = open_cuda(host_library)
    ops = Poisoned(plain.library, plain.device)
    case = CASES[name]
    assert not device_cases.compare(ops, case, 1).passed


def test_nan_and_other_shapes_are_no_match() -> None:
    nan = torch.tensor([float("nan")])
    assert not device_cases.Found(device_cases.close(nan, torch.zeros(1), 1, 1)).passed
    assert not device_cases.Found(device_cases.close(torch.zeros(1), torch.zeros(0), 1, 1)).passed
    assert not device_cases.Found(device_cases.same(torch.zeros(1), torch.zeros(2))).passed


def test_a_case_without_time_is_no_pass(host_library: pathlib.Path) -> None:
    verdicts = dict(device_check.compare(host_library, 1, float("-inf")))
    assert list(verdicts) == list(CASES)
    assert not any(found.passed for found in verdicts.values())


@pytest.mark.slow
def test_every_kernel_has_rows_with_a_floor_and_a_time(host_library: pathlib.Path) -> None:
    ops = open_cuda(host_library)
    clock = device_timings.Clock(ops.device, 1)
    found = device_timings.ceilings(ops, SMALL, clock)
    rows = [device_timings.row(t, found, clock) for t in device_timings.timings(ops, SMALL)]
    assert {row.kernel for row in rows} == {
        *("linear", "attention, decode", "attention, chunk", "add_rms_norm", "silu_mul", "rope"),
        *("kv_append", "kv_gather", "draw", "logprobs"),
    }
    assert all(row.floor > 0 and row.taken > 0 for row in rows)


def test_a_floor_is_the_larger_of_bytes_and_operations() -> None:
    ceilings = device_timings.Ceilings(bandwidth=1e9, rate=1e12)
    clock = device_timings.Clock(torch.device("cpu"), 1)
    timing = device_timings.Timing("some", "shape", 1e6, 1e6, (lambda: None,))
    memory = device_timings.row(timing, ceilings, clock)
    assert (memory.bound, memory.floor) == ("memory", pytest.approx(1000))
    much = dataclasses.replace(timing, operations=1e10)
    compute = device_timings.row(much, ceilings, clock)
    assert (compute.bound, compute.floor) == ("compute", pytest.approx(10000))


@pytest.fixture(scope="module")
def library_without_device(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The ABI as a machine without a GPU has it, CUDA's own error behind it."""
    folder = tmp_path_factory.mktemp("none")
    lines = [f"int aserve_cuda_{name}(void) {{ return 100; }}" for name in abi.CALLS]
    lines += [
        "long aserve_cuda_gemm_workspace(void) { return 0; }",
        "int aserve_cuda_backend(void) { return 0; }",
        "int aserve_cuda_devices(void) { return -100; }",
        "int aserve_cuda_capability(void) { return -100; }",
        'const char* aserve_cuda_error(int code) { return "no device is detected"; }',
    ]
    source = folder / "none.c"
    source.write_text("\n".join(lines), encoding="utf-8")
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(folder / "libnone.so")]
    subprocess.run(command, check=True)
    return folder / "libnone.so"


def test_without_a_gpu_it_says_so_and_exits_2(
    library_without_device: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device_check.main(["--library", str(library_without_device)]) == 2
    told = capsys.readouterr().err
    assert told == "nothing was compared or timed: no CUDA device: no device is detected (100)\n"


def test_without_a_compiler_it_says_so_and_exits_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(build, "in_wheels", lambda program: [])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device_check.main([]) == 1
    assert "no nvcc" in capsys.readouterr().err


def test_a_library_that_is_not_there_exits_1(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert device_check.main(["--library", str(tmp_path / "gone.so")]) == 1
    assert "not built" in capsys.readouterr().err
