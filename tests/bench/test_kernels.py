"""`aserve bench kernels` runs every kernel, names its floor and speaks JSON."""

import json
from collections.abc import Iterator

import pytest
import torch

from aserve import _native
from aserve.bench import attention_cases, case, cases, ceilings, kernels, linear_cases, step_cases
from aserve.bench.attention_cases import Rows
from aserve.tensor.native import NativeOps
from aserve.tensor.reference import ReferenceOps


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small vocabulary, one copy of each weight, short bursts; torch's threads put back."""
    monkeypatch.setattr(case, "VOCAB", 512)
    monkeypatch.setattr(case, "LAYERS", 2)
    monkeypatch.setitem(linear_cases.LINEARS, "head", (512, case.HIDDEN))
    monkeypatch.setattr(case, "WORKING_SET_BYTES", 1)
    monkeypatch.setattr(ceilings, "BURST_S", 1e-5)
    monkeypatch.setattr(ceilings, "SPAN_MAX", 1 << 20)
    monkeypatch.setattr(ceilings, "PROBE_SIDE", 64)
    monkeypatch.setattr(ceilings, "TILE_ROUNDS", 10)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Known(ceilings.Ceilings):
    """Ceilings of round numbers."""

    def __init__(self, bandwidth: float, rate: float) -> None:
        self._bandwidth, self.rate = {1 << 20: bandwidth}, rate


@pytest.mark.slow
def test_every_kernel_has_rows_with_a_floor_a_twin_and_a_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kernels.main(["--rounds", "1", "--threads", "1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["kernel"] for row in told["rows"]} == set(cases.KERNELS)
    assert told["measured"]["rate"] > 0
    assert told["measured"]["bandwidth"]["1 MiB"] > 0
    for row in told["rows"]:
        assert min(row["floor"], row["native"], row["twin"]) > 0
        assert row["of_floor"] == pytest.approx(row["floor"] / row["native"])
        is_bf16 = row["kernel"] == "linear" and row["shape"].startswith("bf16")
        assert (row["torch"] is not None) == is_bf16
    barred = [row for row in told["rows"] if row["bar"] is not None]
    assert [row["bar"] for row in barred] == [2.0, 2.0, 2.0, 2.0, 1.25, 1.5, 1.25, 1.5]
    assert all(row["ratio"] > 0 for row in barred)
    limits = [row["limit"] for row in told["rows"] if row["limit"] is not None]
    assert limits == [50.0, 20.0]


def test_the_table_has_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main(["--rounds", "1", "--threads", "1", "--only", "norm", "rope"]) == 0
    heading, *rows, machine = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["kernel", "shape"]
    assert [row.split()[0] for row in rows] == ["norm"] * 6 + ["rope"] * 3
    assert "GB/s" in machine


def test_shapes_can_be_matched(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--rounds", "1", "--threads", "1", "--only", "norm", "--match", "32x"]
    assert kernels.main(given) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2


def test_a_bound_is_what_takes_longer() -> None:
    one = case.Case("x", "y", moved=10, ops=100, native=int, twin=int)
    assert kernels.measure(one, Known(1.0, 1.0), 1).bound == "compute"
    assert kernels.measure(one, Known(1.0, 1e9), 1).bound == "memory"
    assert kernels.measure(one, Known(2.0, 1e9), 1).floor == pytest.approx(5e6)


def test_a_bar_is_over_the_base_or_else_over_the_floor() -> None:
    def slow() -> object:
        return sum(range(2000))

    floor = case.Case("x", "y", moved=10, ops=0, native=int, twin=int, bar=2.0)
    row = kernels.measure(floor, Known(1e6, 1.0), 1)
    assert row.base == pytest.approx(10)
    assert row.ratio == pytest.approx(row.native / 10)
    assert "bar 2x met" in kernels.line(row)
    over = case.Case("x", "y", moved=10, ops=0, native=slow, twin=int, base=int, bar=2.0)
    row = kernels.measure(over, Known(1e9, 1.0), 1)
    assert row.ratio is not None
    assert row.ratio > 2
    assert "bar 2x MISSED" in kernels.line(row)


def test_a_limit_is_of_the_time_itself() -> None:
    one = case.Case("x", "y", moved=10, ops=0, native=int, twin=int, limit=1e6)
    assert kernels.line(kernels.measure(one, Known(1e6, 1.0), 1)).endswith("limit 1e+06 us met")
    one = case.Case("x", "y", moved=10, ops=0, native=int, twin=int, limit=0.0)
    assert kernels.line(kernels.measure(one, Known(1e6, 1.0), 1)).endswith("limit 0 us MISSED")


@pytest.mark.parametrize("form", ["bf16", "q8", "q4", "q4m"])
def test_a_random_weight_is_one_and_takes_the_bytes_its_floor_counts(form: str) -> None:
    weight = case.packed(NativeOps(1), form, 64, 128, 2)
    assert weight.format == form
    assert weight.nbytes == pytest.approx(64 * 128 * case.FORMAT_BYTES[form], rel=0.05)
    x = torch.randn(3, 128)
    assert ReferenceOps().linear(x, case.packed(ReferenceOps(), form, 64, 128, 2)).isfinite().all()


def test_a_step_is_the_same_fused_and_plain(ops: NativeOps) -> None:
    whole = step_cases.model_of(ops, "q4m")
    call = step_cases.step_call(whole, ops, Rows(2, 1, 20))
    through = whole.model.through
    with torch.inference_mode():
        fused, plain = call(False)(), call(True)()
    assert whole.model.through is through
    assert through is not whole.model.one_by_one
    assert fused == plain


def test_a_steps_floor_counts_every_weight_and_key_once(ops: NativeOps) -> None:
    whole = step_cases.model_of(ops, "bf16")
    hidden, ffn, layers, vocab = case.HIDDEN, case.FFN, case.LAYERS, case.VOCAB
    products = layers * (hidden * (960 + 576) + 3 * hidden * ffn) + vocab * hidden
    assert (whole.products, whole.nbytes) == (products, 2 * products)
    moved, operations = step_cases.floor_of(whole, Rows(1, 1, 100))
    assert moved == whole.nbytes + layers * 100 * 2 * 3 * 64 * 2
    assert operations == 2 * products + layers * 4 * 100 * 9 * 64


def test_rows_of_a_chunk_see_those_before_them() -> None:
    assert attention_cases.seen_keys(Rows(1, 4, 4)) == 1 + 2 + 3 + 4
    assert attention_cases.seen_keys(Rows(2, 1, 7)) == 14
    step = attention_cases.step_of(Rows(2, 3, 20))
    assert step.positions_T.tolist() == [17, 18, 19] * 2
    assert step.row_start_M.tolist() == [0, 3, 6]
    assert len(set(step.slots_T.tolist())) == 6


def test_a_tree_stands_by_depth_and_each_pool_is_what_its_floor_counts(ops: NativeOps) -> None:
    step = attention_cases.tree_step(Rows(2, 3, 20), [-1, 0, 0])
    assert step.positions_T.tolist() == [17, 18, 18] * 2
    assert step.tree is not None
    assert step.tree.paths.tolist() == [0, 0, 1, 0, 2] * 2
    for dtype in (torch.bfloat16, torch.int8):
        shape = Rows(3, 1, 32)
        (layer,) = attention_cases.pools_for(shape, 1, dtype)
        assert layer.k_PSHD.nbytes + layer.v_PSHD.nbytes == attention_cases.kv_bytes(shape, dtype)
        q, step = torch.randn(3, case.HEADS, case.HEAD_DIM), attention_cases.step_of(shape)
        out, twin = (one.attention(q, layer, step, 0.1) for one in (ops, ReferenceOps()))
        assert (out - twin).abs().max() < 0.05


@pytest.fixture
def ops() -> NativeOps:
    return NativeOps(1)


@pytest.mark.parametrize("bytes_read", [0, 64, 320, 4096 + 64])
def test_a_probe_reads_every_word(bytes_read: int) -> None:
    memory = torch.arange(1, 1 + (8192 >> 3), dtype=torch.int64)
    lead = -memory.data_ptr() % 64
    words = memory[lead // 8 :]
    got = _native.probe_read(_native.Team(2), words.data_ptr(), bytes_read)
    assert got == int(words[: bytes_read // 8].sum())


def test_a_probe_takes_whole_lines_only() -> None:
    memory = torch.zeros(1024, dtype=torch.uint8)
    address = memory.data_ptr() + -memory.data_ptr() % 64
    for wrong in ((address + 8, 64), (address, 60), (address, -64)):
        with pytest.raises(ValueError, match="64-byte"):
            _native.probe_read(_native.Team(1), *wrong)


def test_products_are_counted_where_there_are_tiles() -> None:
    done = _native.probe_products(_native.Team(2), 3)
    assert done == (2 * 3 * 4 * 2 * 16 * 16 * 32 if _native.level() == "amx" else 0)


def test_a_read_is_measured_at_the_next_power_of_two(ops: NativeOps) -> None:
    found = ceilings.Ceilings(ops, 1)
    assert found.bandwidth(100) == found.bandwidth(1 << 20) == found.bandwidth(1 << 30) > 0
    assert list(found.told()["bandwidth"]) == ["1 MiB"]  # type: ignore[call-overload]


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        kernels.main(["--threads", "0"])
