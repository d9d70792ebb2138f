"""`aserve bench kernels` runs every kernel, names its floor and speaks JSON."""

import json
from collections.abc import Iterator

import pytest
import torch

from aserve.bench import kernel_cases, kernels


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small vocabulary, one copy of each weight, short bursts; torch's threads put back."""
    monkeypatch.setattr(kernel_cases, "VOCAB", 512)
    monkeypatch.setitem(kernel_cases.LINEARS, "head", (512, kernel_cases.HIDDEN))
    monkeypatch.setattr(kernel_cases, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(kernels, "BURST_S", 1e-5)
    monkeypatch.setattr(kernels, "PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "PROBE_SIDE", 64)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_every_kernel_has_rows_with_a_floor_a_twin_and_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kernels.main(["--rounds", "1", "--threads", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["kernel"] for row in told["rows"]} == set(kernel_cases.KERNELS)
    assert told["measured"]["bandwidth"] > 0
    for row in told["rows"]:
        assert min(row["floor"], row["native"], row["twin"]) > 0
        assert row["of_floor"] == pytest.approx(row["floor"] / row["native"])
        assert (row["torch"] is not None) == (row["kernel"] == "linear")


def test_the_table_has_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--rounds", "1", "--threads", "1", "--only", "norm", "rope"]) == 0
    heading, *rows, machine = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["kernel", "shape"]
    assert [row.split()[0] for row in rows] == ["norm"] * 6 + ["rope"] * 3
    assert "GB/s" in machine


def test_a_bound_is_what_takes_longer() -> None:
    case = kernel_cases.Case("x", "y", moved=10, ops=100, native=int, twin=int)
    assert kernels.measure(case, kernels.Machine(1.0, 1.0), 1).bound == "compute"
    assert kernels.measure(case, kernels.Machine(1.0, 1e9), 1).bound == "memory"
    assert kernels.measure(case, kernels.Machine(2.0, 1e9), 1).floor == pytest.approx(5e6)


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kernels.main(["--threads", "0"])
