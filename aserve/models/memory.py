"""Memory that only the loading of a model needed goes back to the system."""

import contextlib
import ctypes
import mmap
import re
import time
from collections.abc import Callable

TRIM_S = 2.0

# Read-only and executable: the code of a library, which the system has in its page cache too.
CODE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r-xp [0-9a-f]+ \S+ (?!0 )\d+ +/", re.MULTILINE)


def give_back() -> None:
    """What was freed, which glibc keeps, and the code of libraries, which comes back as it is used.

    Importing torch alone runs through tens of megabytes of it that are never run again.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc, another system
        libc = ctypes.CDLL(None, use_errno=True)
        libc.malloc_trim(0)
        with open("/proc/self/maps", encoding="utf-8") as file:
            mapped = file.read()
        for found in CODE.finditer(mapped):
            start, end = int(found[1], 16), int(found[2], 16)
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


class Trimming:
    """What steps freed goes back now and then: glibc keeps it in arenas, between what is in use."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._trimmed_s = now()
        self._trim: Callable[[int], int] | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._trim = ctypes.CDLL(None).malloc_trim

    def now_and_then(self) -> bool:
        """Takes about half a millisecond, at most every `TRIM_S` seconds; whether it did."""
        if self._trim is None or self._now() - self._trimmed_s < TRIM_S:
            return False
        self._trim(0)
        self._trimmed_s = self._now()
        return True
