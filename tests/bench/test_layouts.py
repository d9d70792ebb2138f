"""What the measurements of layouts count is right; what they time is the machine's."""

import argparse

import pytest
import trio

from aserve.bench.bundles import measure_bundles
from aserve.bench.layouts import axes_of, measure, plan_table, settings_of, table
from aserve.bench.pipeline import ALL_CHUNKS, simulate, text_of
from aserve.bench.plan_cost import Loop, plan_cost
from aserve.core.chunk import Cost
from aserve.core.config import Layout


def test_a_layout_is_read_as_it_is_written() -> None:
    assert axes_of("pp=2,tp=3 fast") == {"pp": 2, "tp": 3}
    assert axes_of("one rank") == {}
    fast = settings_of("tp=3 fast", "process")
    assert (fast["layout__numerics"], fast["ranks__live"]) == ("fast", "process")
    for wrong in ("tp", "tp=x", "rows=2"):
        with pytest.raises(ValueError, match="is no layout"):
            axes_of(wrong)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2, tp=2), Layout(tp=3, dp=3)])
def test_every_sequence_of_a_layout_is_planned_to_its_end(layout: Layout) -> None:
    loop = Loop(layout, running=6, steps=20)
    while loop.step():
        continue
    statistics = loop.planner.statistics()
    assert (statistics.running, statistics.waiting, statistics.requests) == (0, 0, 6)
    assert not loop.in_flight
    cost = plan_cost(layout, running=6, steps=20)
    assert cost.plan_bytes > 0
    assert "| x |" in plan_table({"x": cost})


def test_dynamic_chunks_are_never_simulated_as_better_than_hindsight_by_much() -> None:
    rows = simulate(Cost(0.2, 200.0, 500.0, 0.4), measured_pp=2)
    for row in rows:
        assert row.best in ALL_CHUNKS
        assert row.ttft_share <= row.ttft_share_best + 1e-9  # the best fixed beats this fixed one
        assert row.ttft_share_best > 0.9
        assert 0 <= row.dynamic_wait <= row.fixed_wait
    assert text_of([], rows).count("\n") == len(rows) + 4


@pytest.mark.slow
def test_bundles_are_carried_over_both_kinds_of_socket() -> None:
    rows = measure_bundles()
    assert [(row.transport, row.n_bytes >> 10) for row in rows] == [
        (transport, size) for size in (4, 4096) for transport in ("unix", "tcp", "memcpy")
    ]
    assert all(row.micros > 0 for row in rows)


@pytest.mark.slow
def test_layouts_are_measured_beside_one_rank(tiny_model_path: object) -> None:
    options = argparse.Namespace(
        model=tiny_model_path, layouts=["tp=2", "pp=2"], live=["thread"], streams=2, tokens=2,
        rounds=1,
    )  # fmt: skip
    rows = trio.run(measure, options)
    assert [(row.layout, row.live) for row in rows] == [
        ("one rank", "auto"),
        ("tp=2", "thread"),
        ("pp=2", "thread"),
    ]
    assert rows[0].of_one == (1.0, 1.0, 1.0)
    assert "2 streams" in table(rows, 2)
