"""What only the shared-memory plane can get wrong: its name, its rounds, its sleepers."""

import errno
import os
import pathlib
import threading

import pytest
import torch

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import ConfigError, PlaneError, PlaneTimeout
from aserve.planes import shared_memory
from aserve.planes.layer import LayerEnd
from aserve.planes.shared_memory import open_shared_memory_plane, remove_shared_memory
from aserve.testing.collectives import Group, check_collective, every_op
from tests.planes import ranks

PAIR = Grid(Layout(tp=2))
X = torch.ones(1, 4)


@pytest.fixture
def name() -> str:
    return f"aserve-test-{os.getpid()}-{next(ranks.NUMBERS)}"


def files(name: str) -> list[str]:
    return [path.name for path in pathlib.Path("/dev/shm").glob(f"{name}*")]


def test_the_name_is_gone_once_all_ranks_have_it(name: str) -> None:
    first = open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    assert files(name) == [f"{name}.0"]
    second = open_shared_memory_plane(name, PAIR, 1, limit_s=5)
    assert files(name) == []
    with ranks.closing({0: first, 1: second}):
        raised = ranks.on_threads(PAIR, lambda rank: both([first, second][rank]))
    assert raised == {0: None, 1: None}


def both(plane: LayerEnd) -> None:
    plane.start(0)
    assert plane.group("tp").all_reduce(X).tolist() == [2.0] * 4


def test_who_is_late_since_it_waits_for_another_is_not_the_one_that_is_missing(name: str) -> None:
    """Of attn_tp 01 23, rows 02 13: rank 0 waits for 1, which waits for 3."""
    grid = Grid(Layout(tp=4, cp=2))
    planes = {rank: open_shared_memory_plane(name, grid, rank, limit_s=0.05) for rank in range(4)}

    def body(rank: int) -> None:
        if rank == 1:
            ranks.wait_until_waiting(planes[0])
        if rank < 2:
            planes[rank].start(0)
            planes[rank].group(("attn_tp", "rows")[rank]).all_reduce(X)

    with ranks.closing(planes):
        raised = ranks.on_threads(grid, body)
    for rank in (0, 1):
        error = raised[rank]
        assert isinstance(error, PlaneTimeout)
        assert error.missing == (3,)


def test_a_name_that_not_all_opened_goes_with_its_rank_or_its_leader(name: str) -> None:
    open_shared_memory_plane(name, PAIR, 0, limit_s=5).close()
    assert files(name) == []
    open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    remove_shared_memory(name, PAIR)
    remove_shared_memory(name, PAIR)
    assert files(name) == []


def test_where_nothing_can_be_made_nothing_need_be_removed(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kept it from being made is the error to tell, not one more of the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "file")
    remove_shared_memory(name, PAIR)


def test_a_rank_opens_a_name_once_and_all_with_the_same_sizes(name: str) -> None:
    plane = open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    with pytest.raises(PlaneError, match="has this rank already"):
        open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    with pytest.raises(PlaneError, match="other ranks or sizes"):
        open_shared_memory_plane(name, PAIR, 1, limit_s=5, half_bytes=4096)
    plane.close()


@pytest.mark.parametrize("bad", ["", "../secret", "a/b", "x" * 201])
def test_a_name_stays_in_its_folder(bad: str) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        open_shared_memory_plane(bad, PAIR, 0, limit_s=5)


def test_a_host_without_shared_memory_is_told_what_to_do_instead(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"No such file.*layer_plane torch"):
        open_shared_memory_plane(name, PAIR, 0, limit_s=5)


def test_a_link_in_the_way_is_neither_followed_nor_removed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    (tmp_path / f"{name}.0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"symbolic links"):
        open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    assert (tmp_path / f"{name}.0").is_symlink()
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_file_system_is_told_before_anybody_writes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, start: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"No space left.*layer_plane torch"):
        open_shared_memory_plane(name, PAIR, 0, limit_s=5)
    assert files(name) == []


def test_one_rank_needs_no_memory(name: str) -> None:
    plane = open_shared_memory_plane(name, Grid(Layout(pp=2)), 1, limit_s=5)
    plane.start(0)
    assert plane.group("tp").all_reduce(X).tolist() == [1.0] * 4
    assert files(name) == []
    plane.abort("over")
    with pytest.raises(PlaneError, match="over"):
        plane.start(1)


@pytest.mark.parametrize("half_bytes", [64, 80, 1000])
def test_tensors_go_in_rounds_through_halves_of_any_size(name: str, half_bytes: int) -> None:
    grid = Grid(Layout(tp=4, dp=2))
    planes = {
        rank: open_shared_memory_plane(name, grid, rank, limit_s=20, half_bytes=half_bytes)
        for rank in range(grid.world)
    }

    def run(rank: int) -> None:
        tp, rows = (Group(planes[rank], grid, group) for group in ("tp", "rows"))
        planes[rank].start(0)
        for step in range(3):
            every_op(tp, step)
            every_op(rows, step)
        tp.all_reduce((4, 37), torch.float64)
        tp.all_gather([0, 100, 3, 0], (3,), torch.float32)
        tp.reduce_scatter(3, [20, 0, 1, 7], 3, torch.float32)
        tp.all_to_all([[30, 1, 0, 2], [0, 0, 0, 9], [40, 0, 0, 0], [1, 2, 3, 4]], 2, torch.int64)

    with ranks.closing(planes):
        raised = ranks.on_threads(grid, run)
    assert set(raised.values()) == {None}, raised


def test_more_blocks_than_a_half_holds_are_refused(name: str) -> None:
    planes = [open_shared_memory_plane(name, PAIR, r, limit_s=5, half_bytes=64) for r in (0, 1)]
    planes[0].start(0)
    with pytest.raises(ValueError, match="blocks exceed a half"):
        planes[0].group("tp").all_reduce(torch.zeros(17, 2))


def test_abort_wakes_a_rank_that_sleeps(name: str) -> None:
    planes = [open_shared_memory_plane(name, PAIR, rank, limit_s=60) for rank in (0, 1)]
    reason = "its process died"

    def wait() -> None:
        planes[0].start(0)
        with pytest.raises(PlaneError, match=reason):
            planes[0].group("tp").all_reduce(X)
        woken.set()

    woken = threading.Event()
    thread = threading.Thread(target=wait)
    thread.start()
    ranks.wait_until_waiting(planes[0])
    planes[1].abort(reason)
    assert woken.wait(10)
    thread.join()
    assert "(returned)" in planes[0].last_call


def test_a_reason_longer_than_the_segment_holds_is_cut(name: str) -> None:
    planes = [open_shared_memory_plane(name, PAIR, rank, limit_s=60) for rank in (0, 1)]
    planes[0].abort("why " * 9000)
    with pytest.raises(PlaneError, match="why why why"):
        planes[1].start(0)


@pytest.mark.slow
def test_two_ranks_in_a_hurry_never_take_each_other_for_strangers() -> None:
    check_collective(ranks.run_shared_memory, ["many calls"] * 3)


def test_doctor_reads_a_rank_that_never_called(name: str) -> None:
    plane = open_shared_memory_plane(name, PAIR, 1, limit_s=60)
    assert plane.last_call == "rank 1 has made no call"
    plane.close()
    with pytest.raises(PlaneError, match="rank 1 closed its layer plane"):
        plane.start(0)
