"""A rank in a process of its own, told over its standard input which cases to run.

Each line numbers and names a case; the answer is `ok` or what went wrong. A line `close` closes
the plane, so that a rank that ended early still stands there for its peers.
"""

import os
import signal
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import PlaneError, PlaneTimeout, RankDied
from aserve.planes.layer import LayerEnd
from aserve.planes.shared_memory import open_shared_memory_plane
from aserve.planes.torch_exchange import Network
from aserve.planes.torch_plane import open_torch_plane
from aserve.testing.collectives import CASES, Case

ERRORS: dict[str, type[PlaneError]] = {"shared-memory": PlaneTimeout, "gloo": RankDied}


def killed(plane: LayerEnd, grid: Grid) -> None:
    """Rank 1 is killed: shared memory misses it at the limit, gloo sees its connection break."""
    plane.start(0)
    tp = plane.group("tp")
    tp.all_reduce(torch.ones(1, 4))
    if plane.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PlaneError, match=r"rank 1 (died|is missing)") as caught:
        tp.all_reduce(torch.ones(1, 4))
    assert type(caught.value) is ERRORS[sys.argv[1]], repr(caught.value)


def hurried(plane: LayerEnd, grid: Grid) -> None:
    """Calls of two groups with nothing between them, where a race would have its chance."""
    tp, rows, attn_tp = plane.group("tp"), plane.group("rows"), plane.group("attn_tp")
    x = torch.ones(1, 8)
    for step in range(300 if sys.argv[1] == "shared-memory" else 40):
        plane.start(step)
        for _ in range(4):
            assert tp.all_reduce(x)[0] == tp.size
            assert rows.all_gather(x, [1] * rows.size).sum() == 8 * rows.size
        assert attn_tp.all_reduce(x)[0] == attn_tp.size


OWN_CASES = {
    case.name: case
    for case in (
        Case("killed", Layout(tp=3), killed, 1.0),
        Case("hurried", Layout(tp=2), hurried),
        Case("hurried over four", Layout(tp=4, dp=2), hurried),
    )
}


def opened(transport: str, where: str, number: str, rank: int, case: Case) -> LayerEnd:
    grid = Grid(case.layout)
    if transport == "shared-memory":
        return open_shared_memory_plane(f"{where}-{number}", grid, rank, limit_s=case.limit_s)
    host, port = where.rsplit(":", 1)
    store = dist.TCPStore(host, int(port), None, False, timedelta(seconds=20))
    network = Network(dist.PrefixStore(number, store), host)
    return open_torch_plane(grid, rank, network, limit_s=case.limit_s)


def main() -> None:
    transport, where, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    for line in iter(sys.stdin.readline, ""):
        number, _, name = line.strip().partition(" ")
        case = (CASES | OWN_CASES)[name]
        said = "ok"
        plane = opened(transport, where, number, rank, case)
        try:
            case.body(plane, Grid(case.layout))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".replace("\n", " | ")
        print(said, flush=True)
        assert sys.stdin.readline() == "close\n"
        plane.close()


if __name__ == "__main__":
    main()
