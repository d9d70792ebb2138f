"""Opening operations, the level they run at, the threads behind them, and the group of one rank."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from aserve import _native
from aserve.errors import ConfigError
from aserve.tensor.collective import OneRank
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, KvLayer, open_ops
from aserve.tensor.reference import ReferenceOps


def test_open_ops_by_name() -> None:
    assert isinstance(open_ops("native", 1), NativeOps)
    assert isinstance(open_ops("reference", 1), ReferenceOps)
    with pytest.raises(ConfigError, match="threads is 0"):
        open_ops("native", 0)
    with pytest.raises(ConfigError, match="'cuda'"):
        open_ops("cuda", 1)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["generic", "avx2", "amx", "nonsense"])
def test_environment_lowers_the_level(level: str) -> None:
    script = "from aserve import _native; print(_native.level())"
    environment = {**os.environ, "ASERVE_CPU": level}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    names = ["generic", "avx2", "avx512", "amx"]
    best = names.index(_native.level_max())
    wanted = names.index(level) if level in names else best
    assert done.stdout.strip() == names[min(best, wanted)]


def test_level_names_are_checked() -> None:
    with pytest.raises(ValueError, match="a level is generic"):
        _native.set_level("sse")


def test_a_task_that_fails_on_a_worker_fails_the_call_and_not_the_process() -> None:
    team = _native.Team(2)
    both_are_here = threading.Barrier(2, timeout=10)
    ran: list[int] = []

    def task(index: int) -> None:
        ran.append(index)
        if index < 2:
            both_are_here.wait()  # so that caller and worker have one task each
        if threading.current_thread() is not threading.main_thread():
            raise LookupError(f"task {index} on a worker")

    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"LookupError: task \d on a worker"):
            team.run(1000, task)
        assert set(ran) >= {0, 1}
        ran.clear()
    team.run(50, ran.append)
    assert sorted(ran) == list(range(50))


def test_a_task_that_fails_on_the_caller_fails_the_call() -> None:
    def task(index: int) -> None:
        if index == 3:
            raise LookupError("three")

    for threads in (1, 2):
        with pytest.raises(RuntimeError, match="LookupError: three"):
            _native.Team(threads).run(5, task)


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux alone")
def test_a_kernel_without_memory_is_a_memory_error(ops: NativeOps) -> None:
    import resource

    dim = 1 << 20  # of a head; each task wants 128 MiB to work in
    pool = KvLayer(torch.zeros(1, 1, 1, dim), torch.zeros(1, 1, 1, dim))
    one = torch.ones(2, dtype=torch.int32)
    attend = Attend(one, one - 1, (one - 1).view(2, 1), torch.arange(3).int(), one)
    q = torch.zeros(2, 1, dim)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))
    try:
        with pytest.raises(MemoryError):
            ops.attention(q, pool, attend, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    small = KvLayer(torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8))
    assert ops.attention(torch.ones(2, 1, 8), small, attend, 1.0).eq(1).all()


def test_callers_on_several_threads_take_turns() -> None:
    ops = NativeOps(3)
    torch.manual_seed(0)
    packed, x = ops.pack(torch.randn(700, 64)), torch.randn(40, 64)
    expected = ops.linear(x, packed)
    wrong: list[int] = []

    def repeat(index: int) -> None:
        for _ in range(50):
            if not torch.equal(ops.linear(x, packed), expected):
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_teams_come_and_go() -> None:
    weight, x = torch.randn(300, 32), torch.randn(20, 32)
    expected = NativeOps(1).linear(x, NativeOps(1).pack(weight))
    for _ in range(30):
        ops = NativeOps(4)
        assert torch.equal(ops.linear(x, ops.pack(weight)), expected)


@pytest.mark.slow
def test_a_forked_child_computes_alone_and_ends() -> None:
    script = """
import os, torch
from aserve.tensor.native import NativeOps
torch.set_num_threads(1)
ops = NativeOps(3)
packed, x = ops.pack(torch.ones(500, 64)), torch.ones(40, 64)
ops.linear(x, packed)
child = os.fork()
if child == 0:
    good = bool(ops.linear(x, packed).eq(64).all())
    del ops, packed
    os._exit(0 if good else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert ops.linear(x, packed).eq(64).all()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.slow
def test_threads_that_cannot_be_had_are_a_config_error() -> None:
    script = """
import pathlib, re, resource
from aserve.errors import ConfigError
from aserve.tensor.ops import Attend, KvLayer, open_ops
status = pathlib.Path("/proc/self/status").read_text()
used = int(re.search(r"VmSize:\\s+(\\d+)", status)[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
try:
    open_ops("native", 256)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.startswith("compute.threads 256: ")


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_silly_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="1 to 1024"):
        NativeOps(threads)


def test_one_rank_is_the_identity_with_checks() -> None:
    group, x = OneRank(), torch.randn(3, 2)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_gather(x, [3]) is x
    assert group.all_to_all(x, [3], [3]) is x
    total = (x[0] + x[1]) + x[2]
    assert torch.equal(group.all_reduce(x), total)
    assert torch.equal(group.reduce_scatter(x, [2]), total)
    with pytest.raises(ValueError, match="3 rows, the tensor has 2"):
        group.all_gather(x[:2], [3])
    with pytest.raises(ValueError, match="one rank"):
        group.all_to_all(x, [1, 2], [3])
    with pytest.raises(ValueError, match="bfloat16"):
        group.all_reduce(x.bfloat16())
