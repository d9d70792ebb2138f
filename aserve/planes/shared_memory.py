"""The layer plane between processes of one host: peers read each other's tensors where they lie.

Python says what a call is and why one failed; csrc/include/aserve/board.h does the rest. One
segment a stage, made by whoever comes first and nameless once all its ranks have it.
"""

import contextlib
import math
import os
import pathlib
import re
import time
from typing import Any

import torch
from torch import Tensor

import aserve._native as native
from aserve.core.layout import GROUPS, Grid
from aserve.errors import ConfigError, PlaneError
from aserve.planes import signature
from aserve.planes.board import Call
from aserve.planes.layer import Alone, LayerEnd
from aserve.planes.signature import Failure, Signature

FOLDER = pathlib.Path("/dev/shm")
HALF_BYTES = 512 << 10  # of each of a rank's two; larger tensors go in rounds
TELL_S = 0.1  # for a peer that broke the plane to have written down why
READS_MAX = 3  # of a peer's last call while the peer goes on


class SharedMemory:
    """One rank's map of its stage's segment."""

    def __init__(self, name: str, grid: Grid, rank: int, limit_s: float, half_bytes: int) -> None:
        self._first = rank // grid.tp * grid.tp  # ranks of the board count from 0
        self._grid = grid
        self._rank = rank
        self._ranks = grid.tp
        self._limit_s = limit_s
        self._path = _path(name, rank // grid.tp)
        self._board = _open(self._path, grid.tp, rank - self._first, half_bytes, limit_s)
        if self._board.attached == grid.tp:
            self._unlink()
        self._groups: dict[tuple[int, ...], int] = {}
        for place, group in enumerate(GROUPS):
            members = grid.group(group, rank)
            if len(members) > 1 and members not in self._groups:
                local = tuple(member - self._first for member in members)
                self._groups[members] = self._board.open_group(place, local)

    def start(self, step: int) -> None:
        if failure := self._failure():
            raise failure.error()

    def meet(self, call: Call) -> Tensor:
        called = call.signature
        words = native.Called(called.agreed(), called.own(), self._ranks)
        group = self._groups[call.members]
        out, met = _OPS[called.op](self._board, group, words, call)
        if met != native.Met.ok:
            self._raise(call, met)
        return out

    def _raise(self, call: Call, met: object) -> None:
        peers = [self._first + peer for peer in self._board.peers]
        if met == native.Met.mismatch:
            theirs = self.call_of(peers[0])
            both = sorted([(self._rank, str(call.signature)), (peers[0], theirs[0])])
            self.fail(signature.mismatch(*(text for _, text in both)))
        elif met == native.Met.timeout and peers:
            missing, told = signature.absent(peers, self._awaited_by)
            last = [signature.last_seen(peer, *self.call_of(peer)) for peer in told]
            self.fail(signature.timeout(str(call.signature), self._limit_s, missing, last))
        elif met == native.Met.timeout:
            self.fail(signature.broken(f"{call.signature}: a peer came and stopped there"))
        raise self._told().error()

    def _awaited_by(self, rank: int) -> list[int] | None:
        at, waiting = self.call_of(rank)
        if at is None or not waiting:
            return None
        peers = [
            peer for peer in self._grid.group(at.group, rank) if peer not in (rank, self._rank)
        ]
        calls = {peer: self.call_of(peer)[0] for peer in peers}
        return [peer for peer, its in calls.items() if its is None or its.agreed() != at.agreed()]

    def _told(self) -> Failure:
        until_s = time.monotonic() + TELL_S
        while time.monotonic() < until_s:
            if failure := self._failure():
                return failure
            time.sleep(0.001)
        return signature.broken("a rank broke the layer plane and died before it said why")

    def _failure(self) -> Failure | None:
        text = self._board.failure()
        return signature.decode_failure(text) if text else None

    def fail(self, failure: Failure) -> None:
        text = signature.encode_failure(failure)
        if len(text) > native.Board.text_bytes_max:
            text = signature.encode_failure(signature.broken(str(failure.error())[:2000]))
        self._board.fail(text)

    def call_of(self, rank: int) -> tuple[Signature | None, bool]:
        """A rank's last call, as well as it can be read while it makes others; whether it waits."""
        for _ in range(READS_MAX):
            found = self._board.last(rank - self._first)
            if found is None:
                continue
            agreed, own, waiting = found
            with contextlib.suppress(ValueError, IndexError):  # words of two calls
                return signature.from_words(agreed, own), waiting
        return None, False

    def last_call(self) -> str:
        return signature.last_seen(self._rank, *self.call_of(self._rank))

    def close(self) -> None:
        """The memory goes with this object: a forward may still be in a call."""
        self._unlink()

    def _unlink(self) -> None:
        self._path.unlink(missing_ok=True)


def _reduce(
    board: native.Board, group: int, words: native.Called, call: Call
) -> tuple[Tensor, object]:
    parts, counts = call.tensor, call.signature.counts
    n_blocks, *shape = parts.shape
    n = parts.numel() // n_blocks
    start, end = 0, n
    if counts:  # this rank's rows only
        row = math.prod(shape[1:])
        start = sum(counts[: call.place]) * row
        shape[0] = counts[call.place]
        end = start + shape[0] * row
    out = torch.empty(shape, dtype=parts.dtype)
    met = board.reduce(
        *(group, words, parts.data_ptr(), n_blocks, n, start, end, out.data_ptr()),
        parts.dtype is torch.float64,
    )
    return out, met


def _gather(
    board: native.Board, group: int, words: native.Called, call: Call
) -> tuple[Tensor, object]:
    x, counts = call.tensor, call.signature.counts
    out = torch.empty((sum(counts), *x.shape[1:]), dtype=x.dtype)
    row = _row_bytes(x)
    sizes = tuple(count * row for count in counts)
    return out, board.gather(group, words, x.data_ptr(), sizes, out.data_ptr())


def _exchange(
    board: native.Board, group: int, words: native.Called, call: Call
) -> tuple[Tensor, object]:
    x, row, n = call.tensor, _row_bytes(call.tensor), len(call.members)
    sizes = tuple(count * row for count in call.signature.counts)
    out = torch.empty((sum(call.signature.counts[n:]), *x.shape[1:]), dtype=x.dtype)
    met = board.exchange(group, words, x.data_ptr(), sizes[:n], sizes[n:], out.data_ptr())
    return out, met


def _row_bytes(x: Tensor) -> int:
    return math.prod(x.shape[1:]) * x.element_size()


_OPS = {
    "all_reduce": _reduce,
    "reduce_scatter": _reduce,
    "all_gather": _gather,
    "all_to_all": _exchange,
}


def _path(name: str, stage: int) -> pathlib.Path:
    if not re.fullmatch(r"[\w.-]{1,200}", name):
        raise ValueError(f"{name!r} is not a name for shared memory: letters, digits, . _ -")
    return FOLDER / f"{name}.{stage}"


def _open(path: pathlib.Path, n_ranks: int, rank: int, half_bytes: int, limit_s: float) -> Any:
    n_bytes = native.Board.bytes(n_ranks, half_bytes)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unavailable(path, n_bytes, error) from None
    try:
        # All of it now: a full file system later would end the process with a signal.
        os.posix_fallocate(file, 0, n_bytes)
        return native.Board(file, n_ranks, rank, half_bytes, limit_s)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _unavailable(path, n_bytes, error) from None
    except RuntimeError as error:
        raise PlaneError(f"{path}: {error}") from None
    finally:
        os.close(file)


def _unavailable(path: pathlib.Path, n_bytes: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: {error.strerror}: ranks need {n_bytes} bytes of shared memory; make more room "
        "there, or use --ranks.layer_plane torch"
    )


def open_shared_memory_plane(
    name: str, grid: Grid, rank: int, *, limit_s: float, half_bytes: int = HALF_BYTES
) -> LayerEnd:
    """The end of one rank among the processes of this host, which all give the same new name.

    Waits for nobody: peers that do not come within `limit_s` seconds of a call are missing there.
    The name is gone once all ranks have opened it; if some never do, `close` (or, where ranks were
    killed, `remove_shared_memory`) removes it. Raises ConfigError where the memory cannot be had,
    PlaneError where the name is another grid's. A rank that is killed is not noticed here: who
    sees it die calls `abort` on any end of the stage.
    """
    assert 0 <= rank < grid.world, (rank, grid.world)
    if grid.tp == 1:
        return LayerEnd(grid, rank, Alone(rank))
    return LayerEnd(grid, rank, SharedMemory(name, grid, rank, limit_s, half_bytes))


def remove_shared_memory(name: str, grid: Grid) -> None:
    """What ranks that were killed while opening a plane left behind; nothing is not an error."""
    for stage in range(grid.pp):
        with contextlib.suppress(OSError):  # a folder that cannot be written holds nothing of ours
            _path(name, stage).unlink()
