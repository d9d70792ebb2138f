"""One rank's process, seen from its leader: started, heard, watched, and ended whatever happens.

It gets its summons through a pipe that stays open as long as the leader lives: its end tells the
process to end too, as does the kernel (PR_SET_PDEATHSIG). What it says on its standard output is
progress, a JSON line each.
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import trio

from aserve.actors.loading import Progress
from aserve.errors import RankDied

logger = logging.getLogger("aserve.engine")

LINE_BYTES_MAX = 1 << 16
TELL_S = 0.1  # a connection ends a little before its process


class Summons(msgspec.Struct, frozen=True):
    """All that a new process must know to find its leader; the rest is said there."""

    rank: int
    world: int
    in_flight_max: int
    address: str
    secret: bytes
    run: str
    start_s: float
    leader_pid: int


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A word of progress."""

    done: int
    total: int
    what: str


class Child:
    """Made by `open_child`."""

    def __init__(self, summons: Summons) -> None:
        self.rank = summons.rank
        # Forked from this very thread, whose end is what PR_SET_PDEATHSIG is about; and in a group
        # of its own, where the terminal's Ctrl-C does not reach it.
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "aserve.actors.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died already: `wait` tells
            self._popen.stdin.write(msgspec.json.encode(summons) + b"\n")

    async def wait(self) -> str:
        """Until the process has ended; how it did."""
        await self.wait_end()
        return ending(self._popen.wait())

    async def wait_end(self) -> None:
        await trio.lowlevel.wait_readable(self._pidfd)

    @property
    def ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    async def listen(self, progress: Progress | None) -> None:
        """Until it closes its output; what is no progress is not looked at."""
        assert self._popen.stdout is not None
        decoder = msgspec.json.Decoder(Step)
        buffer = b""
        async with trio.lowlevel.FdStream(os.dup(self._popen.stdout.fileno())) as stream:
            async for data in stream:
                *lines, buffer = (buffer + data).split(b"\n")
                buffer = buffer[-LINE_BYTES_MAX:]
                for line in lines:
                    with contextlib.suppress(msgspec.MsgspecError):
                        word = decoder.decode(line)
                        if progress is not None:
                            progress(word.done, word.total, word.what)

    def kill(self) -> None:
        """The process and all it may have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """The process has been waited for."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.stdout.close()
        os.close(self._pidfd)


@asynccontextmanager
async def open_children(summonses: list[Summons]) -> AsyncIterator[list[Child]]:
    """A process a summons; not one of them, nor of what they started, outlives the block."""
    children: list[Child] = []
    try:
        for summons in summonses:
            children.append(Child(summons))
            await trio.lowlevel.checkpoint()  # starting one takes milliseconds
        yield children
    finally:
        if _died(sys.exception()):
            await _tell_ended(children)
        for child in children:
            child.kill()
        with trio.CancelScope(shield=True):  # killed: the kernel is about to be done with it
            for child in children:
                await child.wait()
                child.close()


def _died(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(RankDied) is not None
    return isinstance(error, RankDied)


async def _tell_ended(children: list[Child]) -> None:
    """Log what ended which process, before we end the others: all that peers know is that its
    connection is gone."""
    with trio.move_on_after(TELL_S) as scope:
        scope.shield = True
        async with trio.open_nursery() as nursery:

            async def wait(child: Child) -> None:
                await child.wait_end()
                nursery.cancel_scope.cancel()

            for child in children:
                nursery.start_soon(wait, child)
    for child in children:
        if child.ended:
            logger.error("rank %d: %s", child.rank, await child.wait())


def ending(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        return f"its process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was ended by signal {-code}"
