"""The conformance suite where ranks are processes: shared memory and gloo."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from aserve.core.layout import Grid
from aserve.testing.collectives import CASES, Case, check_collective
from tests import tree
from tests.planes.rank_process import OWN_CASES

# Of the suite, what four processes add to threads: memory and sockets that are truly apart.
NAMES = [
    *("every op over 2 ranks", "every op over 3 ranks", "groups of attention DP", "two stages"),
    *("large tensors", "order of sums", "repeatable", "different op", "different step"),
    *("one absent", "aborted", "other stage"),
]


class Ranks:
    """Four rank processes; a case of fewer ranks uses the first."""

    def __init__(self, transport: str, where: str) -> None:
        self.number = 0
        command = [sys.executable, "-m", "tests.planes.rank_process", transport, where]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=tree.ROOT,
                env=environment,
            )
            for rank in range(4)
        ]

    def tell(self, rank: int, line: str) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(f"{line}\n")
        stdin.flush()

    def answer(self, rank: int) -> str:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        return stdout.readline().strip() or "the process ended"

    def run(self, case: Case) -> Mapping[int, str | None]:
        ranks = range(Grid(case.layout).world)
        self.number += 1
        for rank in ranks:
            self.tell(rank, f"{self.number} {case.name}")
        said = {rank: self.answer(rank) for rank in ranks}
        for rank in ranks:
            if said[rank] != "the process ended":
                self.tell(rank, "close")
        return {rank: None if text == "ok" else text for rank, text in said.items()}

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            with process:
                process.wait()


@contextmanager
def open_ranks(transport: str) -> Iterator[Ranks]:
    store = None
    where = f"aserve-test-{os.getpid()}"
    if transport == "gloo":
        store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), False)
        where = f"127.0.0.1:{store.port}"
    ranks = Ranks(transport, where)
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_processes_pass_the_suite_and_miss_one_that_is_killed(transport: str) -> None:
    with open_ranks(transport) as ranks:
        check_collective(ranks.run, NAMES)
        for name in ("hurried", "hurried over four"):
            assert set(ranks.run(OWN_CASES[name]).values()) == {None}
        said = ranks.run(OWN_CASES["killed"])
    assert said == {0: None, 1: "the process ended", 2: None}
    assert set(NAMES) <= set(CASES)
    assert not list(pathlib.Path("/dev/shm").glob(f"aserve-test-{os.getpid()}*"))
