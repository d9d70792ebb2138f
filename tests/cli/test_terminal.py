"""`aserve chat` on a real (pseudo) terminal: its prompt, Ctrl-C while it answers, Ctrl-D."""

import os
import pathlib
import pty
import select
import sys
import time

import pytest

from aserve.testing.tiny import write_tiny_model

pytestmark = pytest.mark.slow

WAIT_S = 60.0


class Terminal:
    """A child whose terminal we are."""

    def __init__(self, *command: str) -> None:
        self.said = b""
        self.pid, self._fd = pty.fork()
        if not self.pid:
            os.execv(command[0], command)

    def wait_for(self, text: bytes) -> None:
        """Read until `text` was said since the last wait; it and what came before is forgotten."""
        end_s = time.monotonic() + WAIT_S
        while text not in self.said:
            ready, _, _ = select.select([self._fd], [], [], max(0.0, end_s - time.monotonic()))
            assert ready, f"waited for {text!r}, got {self.said!r}"
            self.said += os.read(self._fd, 65536)
        self.said = self.said.partition(text)[2]

    def wait_for_more(self) -> None:
        """Read until anything at all was said."""
        while not self.said:
            assert self._read(), "the terminal closed"

    def type(self, text: bytes) -> None:
        os.write(self._fd, text)

    def close(self) -> int:
        """Wait for the child to end; its exit code."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bytes:
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # Linux says EIO when the other end of a terminal is gone
            data = b""
        self.said += data
        return data


def test_a_conversation_on_a_terminal(tmp_path: pathlib.Path) -> None:
    # A context so long that no answer ends before it is stopped.
    model = write_tiny_model(tmp_path / "tiny", context_len=32768)
    flags = ("--max-tokens", "30000", "--ignore-eos", "--temperature", "0")
    pool = ("--cache.kv_mib_max", "16")
    terminal = Terminal(sys.executable, "-m", "aserve", "chat", str(model), *flags, *pool)
    terminal.wait_for(b"/help lists commands")
    terminal.wait_for(b"> ")
    terminal.type(b"/help\n")
    terminal.wait_for(b"/reset")
    terminal.wait_for(b"> ")
    terminal.type(b"Hello\n")
    terminal.wait_for(b"Hello\r\n")  # the echo
    terminal.wait_for_more()
    terminal.type(b"\x03")
    terminal.wait_for(b"\r\n> ")
    terminal.type(b"/stats\n")
    terminal.wait_for(b"ended by abort")
    terminal.wait_for(b"> ")
    terminal.type(b"\x04")
    assert terminal.close() == 0
    assert b"Traceback" not in terminal.said
