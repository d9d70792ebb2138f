"""Safetensors checkpoints: one file, or shards with `model.safetensors.index.json`."""

import contextlib
import math
import pathlib
from collections.abc import Iterator

import safetensors
import torch
from torch import Tensor

from aserve.errors import ModelError
from aserve.models.spec import read_json
from aserve.models.weights.source import Entry, Index

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Of the last two are the maps of a reduced vocabulary.
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "BOOL": 1}
LISTED_MAX = 8


class SafetensorsSource:
    def __init__(self, folder: pathlib.Path, files: dict[str, safetensors.safe_open]) -> None:
        self.origin = str(folder)
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, safetensors.safe_open] = {}
        for file_name, file in files.items():
            for name in file.keys():  # noqa: SIM118
                if name in self._files:
                    raise ModelError(f"{folder}: tensor {name!r} stands in two files")
                part = file.get_slice(name)
                kind, shape = part.get_dtype(), tuple(part.get_shape())
                if kind not in ITEM_BYTES:
                    raise ModelError(
                        f"{folder / file_name}: tensor {name!r} is {kind}; know "
                        f"{', '.join(ITEM_BYTES)}"
                    )
                self.entries[name] = Entry(shape, kind, math.prod(shape) * ITEM_BYTES[kind])
                self._files[name] = file

    def read(self, name: str, index: Index, dtype: torch.dtype) -> Tensor:
        file = self._files[name]
        wanted = tuple(part.stop - part.start for part in index)
        # A whole tensor is mapped, a part of one is copied.
        whole = wanted == self.entries[name].shape
        tensor = file.get_tensor(name) if whole else file.get_slice(name)[index]
        return tensor.to(dtype)

    def read_blocks(self, name: str, index: Index) -> Tensor:
        raise ValueError(f"{name!r} is {self.entries[name].kind}, which has no blocks")


@contextlib.contextmanager
def open_safetensors(folder: pathlib.Path) -> Iterator[SafetensorsSource]:
    """Map every file of the checkpoint. Raises ModelError for a missing or damaged one."""
    placed = _index(folder)
    names = sorted(set(placed.values())) if placed else _single(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {_listed(missing)}, which {INDEX} names; fetch it again")
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_open(folder / name)) for name in names}
        source = SafetensorsSource(folder, files)
        if absent := sorted(placed.keys() - source.entries.keys()):
            raise ModelError(f"{folder}: {INDEX} promises {_listed(absent)}, in none of its files")
        yield source


def _index(folder: pathlib.Path) -> dict[str, str]:
    if not (folder / INDEX).is_file():
        return {}
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise ModelError(f"{folder / INDEX} has no weight_map from tensors to files")
    for name in placed.values():
        if pathlib.PurePath(name).name != name:
            raise ModelError(f"{folder / INDEX} names {name!r}, which is not a file beside it")
    return placed


def _single(folder: pathlib.Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in names:
        return [SINGLE]
    if len(names) == 1:
        return names
    if names:
        raise ModelError(f"{folder} has {len(names)} .safetensors files but no {INDEX}")
    others = [path.name for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)]
    hint = f"; {others[0]} is pickle, which is never loaded" if others else ""
    raise ModelError(f"{folder} has no .safetensors file{hint}")


def _open(path: pathlib.Path) -> safetensors.safe_open:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{path} is cut off or corrupt: {error}") from error


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return ", ".join(names[:LISTED_MAX]) + more
