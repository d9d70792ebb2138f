"""Shows how far loading is: a bar on a terminal, a line when something starts elsewhere."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

SHOWN_AFTER_S = 0.3  # what is done sooner needs no bar


class Progress:
    """Called as `progress(done, total, what)`, from any one thread at a time; ends with `close`."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None
        self._what = ""
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str) -> None:
        if what != self._what:
            self.close()
            self._what = what
            if not self._terminal:
                sys.stderr.write(f"aserve: {what}\n")
                sys.stderr.flush()
        if self._terminal:
            self._show(done, total, what)

    def _show(self, done: int, total: int, what: str) -> None:
        if self._bar is None:
            self._bar = tqdm(
                total=total or None,
                desc=f"aserve: {what}",
                unit_scale=True,
                leave=False,
                delay=SHOWN_AFTER_S,
                file=sys.stderr,
            )
        self._bar.total = total or None
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self._what = ""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._start_s:.1f} s"
