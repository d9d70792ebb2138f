"""What an all_reduce costs over each layer plane, beside gloo's own, between two ranks.

Between processes but for threads. The last part of the module is what a rank's process runs.
"""

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.planes.layer import LayerEnd, open_thread_planes
from aserve.planes.shared_memory import open_shared_memory_plane
from aserve.planes.torch_exchange import Network
from aserve.planes.torch_plane import open_torch_plane

SIZES = {4 << 10: 200, 64 << 10: 100, 1 << 20: 30}  # bytes, and calls in a burst
BURSTS = 7
LIMIT_S = 30.0
GRID = Grid(Layout(tp=2))
HOST = "127.0.0.1"


class Row(msgspec.Struct, frozen=True):
    """Microseconds a call, of the best burst and of the middle one."""

    transport: str
    n_bytes: int
    best_us: float
    median_us: float

    def __str__(self) -> str:
        size = f"{self.n_bytes >> 10} KiB"
        return (
            f"all_reduce {size:>8} {self.transport:22} best {self.best_us:7.1f} us  "
            f"median {self.median_us:7.1f} us"
        )


def measure_planes() -> list[str]:
    """`measure_collectives` as lines for a person."""
    return [str(row) for row in measure_collectives()]


def measure_collectives(bursts: int = BURSTS) -> list[Row]:
    """By size, then transport; takes some seconds of two cores."""
    store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=LIMIT_S), False)
    command = [sys.executable, "-m", "aserve.bench.planes"]
    command += [str(os.getpid()), str(store.port), str(bursts)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, env=environment)
        for rank in range(GRID.world)
    ]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"ranks ended with {[rank.returncode for rank in ranks]}")
    rows = _over_threads(bursts) + msgspec.json.decode(said[0], type=list[Row])
    return sorted(rows, key=lambda row: row.n_bytes)


def _over_threads(bursts: int) -> list[Row]:
    planes = open_thread_planes(GRID, limit_s=LIMIT_S)
    rows: dict[int, list[Row]] = {}

    def run(rank: int) -> None:
        rows[rank] = _rows("threads", _through(planes[rank]), bursts)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(GRID.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows[0]


def _rows(transport: str, reduce: Callable[[torch.Tensor], object], bursts: int) -> list[Row]:
    rows = []
    for n_bytes, calls in SIZES.items():
        x = torch.ones(1, n_bytes // 4)
        bursts_us = []
        for _ in range(bursts + 1):
            begin_s = time.perf_counter()
            for _ in range(calls):
                reduce(x)
            bursts_us.append((time.perf_counter() - begin_s) / calls * 1e6)
        measured = bursts_us[1:]  # the first one touched the memory
        rows.append(Row(transport, n_bytes, min(measured), statistics.median(measured)))
    return rows


def _through(plane: LayerEnd) -> Callable[[torch.Tensor], object]:
    plane.start(0)
    return plane.group("tp").all_reduce


def _raw_gloo(store: dist.Store, rank: int) -> Callable[[torch.Tensor], object]:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=LIMIT_S)
    group = gloo(dist.PrefixStore("raw", store), rank, GRID.world, options)
    return lambda x: group.allreduce([x]).wait()


def main(arguments: Sequence[str]) -> None:
    leader, port, bursts, rank = map(int, arguments)
    torch.set_num_threads(1)
    store = dist.TCPStore(HOST, port, None, False, timedelta(seconds=LIMIT_S))
    memory = open_shared_memory_plane(f"aserve-bench-{leader}", GRID, rank, limit_s=LIMIT_S)
    rows = _rows("shared memory", _through(memory), bursts)
    for check in ("step", "call"):
        network = Network(dist.PrefixStore(check, store), HOST)
        plane = open_torch_plane(GRID, rank, network, limit_s=LIMIT_S, check=check)
        name = "gloo" if check == "step" else "gloo, calls checked"
        rows += _rows(name, _through(plane), bursts)
    rows += _rows("gloo's own all_reduce", _raw_gloo(store, rank), bursts)
    memory.close()
    sys.stdout.buffer.write(msgspec.json.encode(rows))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
    # Gloo's threads, whose peers may be gone, sometimes abort an interpreter that ends.
    os._exit(0)
