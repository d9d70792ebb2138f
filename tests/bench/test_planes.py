"""`aserve.bench.planes`: every transport is measured in every size, and the rows read well."""

import pytest

from aserve.bench.planes import SIZES, Row, measure_collectives


@pytest.mark.slow
def test_every_transport_is_measured_in_every_size() -> None:
    rows = measure_collectives(bursts=1)
    transports = {row.transport for row in rows}
    assert {"threads", "shared memory", "gloo", "gloo's own all_reduce"} <= transports
    assert len(rows) == len(transports) * len(SIZES)
    assert all(0 < row.best_us <= row.median_us for row in rows)


def test_a_row_reads_as_a_line() -> None:
    line = str(Row("threads", 4096, 25.0, 30.25))
    assert line == "all_reduce    4 KiB threads                best    25.0 us  median    30.2 us"
