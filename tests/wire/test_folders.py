"""Socket folders of processes that were killed go with the next start; nothing else does."""

import os
import pathlib
import socket
import tempfile

import pytest

from aserve.wire.listener import FOLDER_PREFIX, open_socket_folder


@pytest.fixture
def parent(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Stands for the system's folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(parent: pathlib.Path, name: str, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """What a process leaves that was killed an hour ago."""
    folder = parent / f"{FOLDER_PREFIX}{name}"
    folder.mkdir(mode=0o700)
    monkeypatch.chdir(folder)  # pytest's own paths are too long for a socket's address
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("request")
    monkeypatch.chdir(parent)
    age(folder)
    return folder


def age(folder: pathlib.Path) -> None:
    an_hour_ago = folder.stat().st_mtime - 3600
    os.utime(folder, (an_hour_ago, an_hour_ago))


def test_what_a_killed_process_left_is_swept(
    parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = abandoned(parent, "left", monkeypatch)
    with open_socket_folder() as own:
        assert not left.exists()
        assert os.path.isdir(own)


def test_a_folder_in_use_is_not(parent: pathlib.Path) -> None:
    with open_socket_folder() as used:
        age(pathlib.Path(used))
        with open_socket_folder():
            assert os.path.isdir(used)


def test_nor_is_a_new_one_or_one_with_files_or_with_another_name(
    parent: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = abandoned(parent, "young", monkeypatch)
    os.utime(young)
    full = abandoned(parent, "full", monkeypatch)
    (full / "notes").write_text("mine")
    age(full)
    other = parent / "aserve-notes"
    other.mkdir()
    age(other)
    with open_socket_folder():
        assert (young / "request").exists()
        assert (full / "notes").read_text() == "mine"
        assert other.is_dir()
