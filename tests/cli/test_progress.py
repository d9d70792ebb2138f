"""How loading is shown: bars on a terminal, a line for each thing begun elsewhere."""

import io

import pytest

from aserve.cli import progress
from aserve.cli.progress import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_a_bar_that_moves_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0.0)
    with Progress() as shown:
        shown(0, 200, "loading weights")
        shown(100, 200, "loading weights")
        shown._bars["loading weights"].refresh()
        assert "aserve: loading weights:  50%" in screen.getvalue()
        shown(1, 0, "downloading")  # of unknown length
        assert "aserve: downloading" in screen.getvalue()
        assert list(shown._bars) == ["downloading"]
    assert screen.getvalue().endswith("\r")


def test_ranks_side_by_side_have_a_bar_each(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with Progress() as shown:
        shown(1, 1, "downloading")
        for done in (50, 100):
            for rank in range(3):
                shown(done, 200, f"rank {rank}: loading weights")
        assert list(shown._bars) == [f"rank {rank}: loading weights" for rank in range(3)]
        assert [bar.n for bar in shown._bars.values()] == [100, 100, 100]


def test_elsewhere_each_thing_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as shown:
        for done in range(5):
            shown(done, 4, "downloading smollm2")
        shown(0, 10, "loading weights")
    assert capsys.readouterr().err == "aserve: downloading smollm2\naserve: loading weights\n"
