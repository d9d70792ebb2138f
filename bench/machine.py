"""What a number was measured on, in one line; no row is worth anything without it."""

import os
import pathlib
import platform

ISA = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def line() -> str:
    """Processor, cores this process may use, vector units, memory, system and versions."""
    info = _cpuinfo()
    flags = set(info.get("flags", "").split())
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    parts = [
        info.get("model name", platform.machine()),
        f"{len(os.sched_getaffinity(0))} cores",
        " ".join(name for name in ISA if name in flags),
        f"{memory_gib:.0f} GiB",
        _system(),
        f"Python {platform.python_version()}",
    ]
    return ", ".join(part for part in parts if part)


def _cpuinfo() -> dict[str, str]:
    found: dict[str, str] = {}
    path = pathlib.Path("/proc/cpuinfo")
    for row in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        name, _, value = row.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform(terse=True)
