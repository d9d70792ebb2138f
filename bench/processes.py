"""A process and its descendants: started, measured, paused while others compute, and ended."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

END_S = 20.0
PROC = pathlib.Path("/proc")
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ ([0-9a-f]+) (\S+) (\d+)")


@contextlib.contextmanager
def child(command: Sequence[str], **options: object) -> Iterator["subprocess.Popen[str]"]:
    """A process in a session of its own; when the block is left it is asked to end, then made to,
    with all that it started."""
    process: subprocess.Popen[str] = subprocess.Popen(
        command,
        text=True,
        start_new_session=True,
        **options,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        resume(process.pid)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was written to the dead
                    pipe.close()


def family(pid: int) -> list[int]:
    """The process and all its living descendants (proc(5), stat)."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:  # grows as it is walked
        found += sorted(children.get(one, []))
    return found


def pause(pid: int) -> None:
    _signal(pid, signal.SIGSTOP)


def resume(pid: int) -> None:
    _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: signal.Signals) -> None:
    for one in family(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


def cpu_s(pid: int) -> float:
    """Processor time used by the process and its living descendants."""
    spent = 0
    for one in family(pid):
        with contextlib.suppress(OSError):
            fields = (PROC / str(one) / "stat").read_text(encoding="utf-8").rpartition(")")[2]
            spent += sum(map(int, fields.split()[11:13]))
    return spent / os.sysconf("SC_CLK_TCK")


def idle_cores(pid: int, seconds: float) -> float:
    """Cores kept busy by a tree that nobody asks for anything."""
    before_s, started_s = cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(pid) - before_s) / (time.perf_counter() - started_s)


def resident_bytes(pid: int) -> int:
    """Memory held by a whole tree: its anonymous pages, and each page of a mapped file once,
    however many of its processes map it and whoever else does (proc(5), smaps)."""
    anonymous, files = 0, dict[tuple[str, ...], int]()
    for one in family(pid):
        with contextlib.suppress(OSError):
            rollup = (PROC / str(one) / "smaps_rollup").read_text(encoding="utf-8")
            smaps = (PROC / str(one) / "smaps").read_text(encoding="utf-8")
            anonymous += _kib(rollup)["Pss_Anon"]
            for mapping, kib in mapped(smaps).items():
                files[mapping] = max(files.get(mapping, 0), kib)
    return 1024 * (anonymous + sum(files.values()))


def mapped(smaps: str) -> dict[tuple[str, ...], int]:
    """KiB resident of each part of a file: by device, inode, offset and length."""
    found: dict[tuple[str, ...], int] = {}
    for block in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", smaps):
        head = MAPPING.match(block)
        if head is None or head[3] == "0":
            continue
        sizes = _kib(block)
        part = (head[2], head[3], head[1], str(sizes["Size"]))
        shared = sizes["Rss"] - sizes["Anonymous"]  # pages written to are anonymous
        found[part] = max(found.get(part, 0), shared)
    return found


def _kib(text: str) -> Mapping[str, int]:
    return {name: int(kib) for name, kib in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}
