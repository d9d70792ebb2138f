"""A peer's folder is made once, whole or not at all; a failed step says how it ended."""

import pathlib
import sys

import pytest

from bench import install, weights
from bench.install import InstallError


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return install.peers_folder() / "peer"


def test_a_folder_is_filled_once(folder: pathlib.Path) -> None:
    said: list[str] = []
    for is_new in (True, False):
        with install.once(folder, said.append) as answer:
            assert answer is is_new
            (folder / "file").write_text("x")
    assert (folder / "file").read_text() == "x"
    assert said == []


def test_an_attempt_that_was_cut_short_leaves_nothing(folder: pathlib.Path) -> None:
    def attempt() -> None:
        with install.once(folder, print):
            (folder / "half").write_text("x")
            raise InstallError("no space")

    with pytest.raises(InstallError, match="no space"):
        attempt()
    with install.once(folder, print) as is_new:
        assert is_new
        assert list(folder.iterdir()) == []


def test_a_failed_step_shows_the_command_and_the_end_of_its_log(folder: pathlib.Path) -> None:
    script = "import sys; print('line', *range(3), sep='\\n'); sys.exit('no wheel')"
    said: list[str] = []
    with (
        pytest.raises(InstallError, match=r"ended with 1:[\s\S]*no wheel"),
        install.once(folder, print),
    ):
        install.step((sys.executable, "-c", script), folder, said.append)
    assert said[0].startswith(f"  {sys.executable} -c")


def test_steps_add_to_one_log(folder: pathlib.Path) -> None:
    with install.once(folder, print):
        for word in ("one", "two"):
            install.step((sys.executable, "-c", f"print({word!r})"), folder, lambda text: None)
    assert folder.with_name("peer.log").read_text() == "one\ntwo\n"


def test_another_file_has_another_folder(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"1")
    first = weights._key(gguf)
    gguf.write_bytes(b"12")
    assert weights._key(gguf) != first
    assert first.startswith("model-")
    assert weights.safetensors(tmp_path, print) == tmp_path


def test_requirements_of_every_peer_are_pinned_where_the_peer_is_named() -> None:
    for name, peer in install.PEERS.items():
        named = [one for one in (*peer.requirements, install.LLAMA_SOURCE) if peer.package in one]
        assert any("==" in one for one in named), name
