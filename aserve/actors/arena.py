"""What a process that does nothing but serve asks of the allocator, before it has threads."""

import contextlib
import ctypes

M_ARENA_MAX = -8  # in glibc's malloc.h


def share_arena() -> None:
    """All threads allocate from one arena: glibc would give each its own, with gaps of its own.

    They seldom meet there: what is large or frequent in a step is memory that is kept.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc, another system
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
