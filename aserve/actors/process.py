"""`python -m aserve.actors.process`: a rank's process. Started by its leader only; ends with it."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import BinaryIO

import msgspec
import trio

from aserve.actors.child import LINE_BYTES_MAX, Step, Summons

PR_SET_PDEATHSIG = 1  # linux/prctl.h
SAID_EVERY_S = 0.1
NO_LEADER = 3
FAILED = 1


def main() -> int:
    """Obey the leader's summons until there are no more plans; the exit code."""
    # Signals that end the leader are its own to answer: it lets requests end first, with us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    summons_pipe, words = _take_streams()
    line = summons_pipe.readline(LINE_BYTES_MAX)
    try:
        summons = msgspec.json.decode(line, type=Summons)
    except msgspec.MsgspecError:
        sys.stderr.write("aserve.actors.process is started by `aserve` itself, not by hand\n")
        return 2
    end_with_leader(summons.leader_pid, summons_pipe)
    return _follow(summons, words)


def _take_streams() -> tuple[BinaryIO, BinaryIO]:
    """The leader's pipes; whatever prints from here on goes where errors go."""
    summons_pipe, words = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    return summons_pipe, words


def end_with_leader(leader_pid: int, pipe: BinaryIO) -> None:
    """No rank outlives its leader, whatever either is doing: the kernel sees to it, and for what
    it does not cover (a leader gone before we asked) the end of the pipe does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != leader_pid:
        os._exit(NO_LEADER)

    def wait_end() -> None:
        while pipe.read(LINE_BYTES_MAX):
            pass
        os._exit(NO_LEADER)

    threading.Thread(target=wait_end, name="aserve-leader", daemon=True).start()


class Words:
    """Progress as JSON lines, a few a second; the first and last of each kind always."""

    def __init__(self, pipe: BinaryIO) -> None:
        self._pipe = pipe
        self._said_at = 0.0
        self._what = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if what == self._what and done < total and now - self._said_at < SAID_EVERY_S:
            return
        self._what, self._said_at = what, now
        with contextlib.suppress(OSError):  # a leader that is gone: others notice
            self._pipe.write(msgspec.json.encode(Step(done, total, what)) + b"\n")


def _follow(summons: Summons, words: BinaryIO) -> int:
    # Imported late: they bring torch, for seconds in which the leader may die.
    from aserve.actors.arena import share_arena
    from aserve.actors.following import follow_once
    from aserve.errors import AserveError, PeerError

    share_arena()

    async def run() -> None:
        await follow_once(summons, Words(words))

    # Told to the leader as our last word, and here to whoever reads what it does not pass on.
    failures: list[Exception] = []
    try:
        trio.run(run)
    except* PeerError:
        pass  # the leader is gone, or refused us: it knows
    except* (AserveError, OSError) as group:
        failures += group.exceptions
    for failure in failures:
        sys.stderr.write(f"aserve: rank {summons.rank}: {failure}\n")
    return FAILED if failures else 0


if __name__ == "__main__":
    sys.exit(main())
