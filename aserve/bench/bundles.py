"""How fast the hidden plane carries bundles between two processes, beside a copy in memory."""

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import torch
import trio

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.planes.hidden_bundle import Neighbours, shapes_of
from aserve.planes.hidden_stream import open_hidden_listener, open_stream_hidden
from aserve.planes.terms import Terms
from aserve.wire.address import Address, Tcp, Unix, parse_address
from aserve.wire.listener import open_socket_folder

SIZES = {4 << 10: 400, 4 << 20: 40}  # bytes, and bundles of a burst
GRID = Grid(Layout(pp=2))
LIMIT_S = 30.0
SECRET = b"of this measurement"


class Row(msgspec.Struct, frozen=True):
    """The middle one of the receiver's times from bundle to bundle."""

    transport: str
    n_bytes: int
    micros: float

    def __str__(self) -> str:
        speed = self.n_bytes / self.micros / 1e3
        size = f"{self.n_bytes >> 10} KiB"
        return f"bundle {size:>12} {self.transport:22} {self.micros:9.1f} us  {speed:6.2f} GB/s"


def measure_bundles() -> list[Row]:
    """By size: unix, tcp, then a copy of as many bytes."""
    rows: list[Row] = []
    with open_socket_folder() as folder:
        for at in (Unix(os.path.join(folder, "bundles")), Tcp("127.0.0.1", 0)):
            rows += _between_processes(at)
    rows += [_copied(n_bytes, count) for n_bytes, count in SIZES.items()]
    return sorted(rows, key=lambda row: row.n_bytes)


def _between_processes(at: Address) -> list[Row]:
    """The rank that receives says first where it listens, in the end what it saw."""
    receiver = _start("1", str(at))
    assert receiver.stdout is not None
    sender = _start("0", receiver.stdout.readline().decode().strip())
    said = receiver.communicate()[0]
    sender.communicate()
    if receiver.returncode or sender.returncode:
        raise RuntimeError(f"ranks ended with {sender.returncode} and {receiver.returncode}")
    return msgspec.json.decode(said, type=list[Row])


def _start(rank: str, address: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "aserve.bench.bundles", rank, address]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def _copied(n_bytes: int, count: int) -> Row:
    source = torch.ones(n_bytes // 4)
    target = torch.empty_like(source)
    target.copy_(source)  # touches its memory
    times = []
    for _ in range(count):
        begin_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - begin_s)
    return Row("memcpy", n_bytes, _middle_us(times))


async def _receive(address: Address) -> list[Row]:
    beside, terms, rows = Neighbours.of(GRID, 1), Terms(GRID.world, 2, SECRET), []
    steps = itertools.count()
    async with open_hidden_listener(address, terms, beside) as listener:
        print(listener.address, flush=True)
        async with open_stream_hidden(
            beside, terms, listener=listener, following=None, limit_s=LIMIT_S
        ) as end:
            for n_bytes, count in SIZES.items():
                shapes = shapes_of({"hidden": torch.ones(n_bytes // 4)})
                times = []
                for step in itertools.islice(steps, count):
                    await end.receive(step, shapes)
                    times.append(time.perf_counter())
                gaps = [after - before for before, after in itertools.pairwise(times)]
                rows.append(Row(str(address)[:4].rstrip(":"), n_bytes, _middle_us(gaps)))
    return rows


async def _send(address: Address) -> None:
    beside, terms, steps = Neighbours.of(GRID, 0), Terms(GRID.world, 2, SECRET), itertools.count()
    async with open_stream_hidden(
        beside, terms, listener=None, following=address, limit_s=LIMIT_S
    ) as end:
        for n_bytes, count in SIZES.items():
            bundle = {"hidden": torch.ones(n_bytes // 4)}
            for step in itertools.islice(steps, count):
                await end.send(step, bundle)


def _middle_us(times_s: Sequence[float]) -> float:
    return statistics.median(times_s) * 1e6


def main(arguments: Sequence[str]) -> None:
    rank, address = arguments
    torch.set_num_threads(1)
    if rank == "0":
        trio.run(_send, parse_address(address))
    else:
        rows = trio.run(_receive, parse_address(address))
        sys.stdout.buffer.write(msgspec.json.encode(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
