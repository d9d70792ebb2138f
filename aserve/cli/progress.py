"""Shows how far loading is: a bar on a terminal, a line when something starts elsewhere."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SHOWN_AFTER_S = 0.3  # what is done sooner needs no bar


class Progress:
    """Called as `progress(done, total, what)`, by one thread at a time; ends with `close`.

    Ranks that do the same side by side have a bar each.
    """

    def __init__(self) -> None:
        self._bars: dict[str, tqdm[None]] = {}
        self._told: set[str] = set()
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str) -> None:
        if not self._terminal:
            if what not in self._told:
                self._told.add(what)
                sys.stderr.write(f"aserve: {what}\n")
                sys.stderr.flush()
            return
        self._show(done, total, what)

    def _show(self, done: int, total: int, what: str) -> None:
        bar = self._bars.get(what)
        if bar is None:
            for other in [key for key in self._bars if _kind(key) != _kind(what)]:
                self._bars.pop(other).close()
            bar = self._bars[what] = tqdm(
                total=total or None,
                desc=f"aserve: {what}",
                unit_scale=True,
                leave=False,
                delay=SHOWN_AFTER_S,
                file=sys.stderr,
            )
        bar.total = total or None
        bar.update(done - bar.n)

    def close(self) -> None:
        self._told.clear()
        while self._bars:
            self._bars.popitem()[1].close()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _kind(what: str) -> str:
    """What is being done, whichever rank does it."""
    return what.rpartition(": ")[2]


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._start_s:.1f} s"
