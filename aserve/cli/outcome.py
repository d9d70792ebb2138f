"""Turns what a command raises into one clear message and an exit code."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

from aserve.errors import AserveError, ConfigError, RequestError

REFUSED = 2
FAILED = 1
INTERRUPTED = 128 + signal.SIGINT
PIPE_CLOSED = 128 + signal.SIGPIPE


class UsageError(AserveError):
    """Flags or input that make no sense, found after argparse was content."""


def exit_code(run: Callable[[], int]) -> int:
    """Run a command. Errors it is meant to meet become messages; a bug keeps its traceback."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BaseException as error:
        causes = list(leaves(error))
        if not all(isinstance(cause, EXPECTED) for cause in causes):
            raise
        return _tell(causes)


def open_missing_streams() -> None:
    """Let a stream that the caller closed lead nowhere.

    Python has None for it, and the next file or socket opened would get its number and its output.
    """
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            mode = "r" if number == 0 else "w"
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def end_on_signals() -> None:
    """SIGTERM and SIGINT end the process with a line, wherever it is, until others handle them.

    For a start that takes seconds of imports and holds nothing yet: an exception out of the middle
    of some extension's import would come out as any error, or as none.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, _frame: object) -> None:
    name = signal.Signals(number).name
    # Not through sys.stderr, which may be in the middle of a write.
    os.write(2, f"aserve: ended by {name}\n".encode())
    os._exit(128 + number)


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside exception groups, in order."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


EXPECTED = (AserveError, OSError, KeyboardInterrupt)


def _tell(causes: list[BaseException]) -> int:
    if any(isinstance(cause, BrokenPipeError) for cause in causes):
        # Nobody reads on; nor may the interpreter's last flush find out and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    if any(isinstance(cause, KeyboardInterrupt) for cause in causes):
        sys.stderr.write("\n")
        return INTERRUPTED
    for cause in causes:
        findings = cause.findings if isinstance(cause, ConfigError) else (str(cause),)
        for finding in findings:
            say(finding)
    refused = all(isinstance(cause, ConfigError | RequestError | UsageError) for cause in causes)
    return REFUSED if refused else FAILED


def say(message: str) -> None:
    """A line for the person at the terminal."""
    sys.stderr.write(f"aserve: {message}\n")
    sys.stderr.flush()
