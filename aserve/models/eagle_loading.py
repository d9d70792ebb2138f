"""From a folder in a public layout to a `DraftHead`, and what it shares with its target."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any, Unpack

import torch

from aserve.errors import ModelError
from aserve.models.decoder import Model
from aserve.models.eagle import EagleHead
from aserve.models.eagle3 import Eagle3Head
from aserve.models.eagle_spec import DraftHead, HeadSpec, Shared, checked_map, read_spec
from aserve.models.fetch import Progress
from aserve.models.registry import Types, numbers_of, open_checkpoint, spec_of, types_of
from aserve.models.spec import ModelSpec, read_json
from aserve.models.split import WHOLE
from aserve.models.weights.forms import Conversion
from aserve.models.weights.loader import HEAD, ONE_RANK, TABLE, Checklist, Matrix, Reader, Weights
from aserve.models.weights.safetensors import SafetensorsSource, open_safetensors
from aserve.models.weights.source import auto_dtype
from aserve.tensor.blocks import blocks_of
from aserve.tensor.ops import Ops
from aserve.tensor.reference import ReferenceOps

THREADS = 2  # that read ahead
KINDS: dict[str, Any] = {"eagle": EagleHead, "eagle3": Eagle3Head}


def load_head(
    path: str | os.PathLike[str],
    shared: Shared,
    ops: Ops,
    progress: Progress | None = None,
    weights: Conversion | None = None,
) -> DraftHead:
    """The head in a folder with config.json and safetensors, for the target of `shared`.

    `weights` as in `load_model`; None: as the checkpoint has them. Raises ModelError: no head,
    weights as pickle, or in what the two do not fit, with both values.
    """
    with _opened(path, shared.spec) as (spec, source):
        kind, checklist = KINDS[spec.method], Checklist()
        kind(spec, checklist, ops, None)
        reader = Reader(source, ops, spec.layers.dtype, ONE_RANK, 0, weights)
        with reader.reading_ahead(checklist, THREADS, progress):
            head = kind(spec, reader, ops, shared)
        head.nbytes = reader.nbytes
        if spec.has_map:
            whole = (slice(0, spec.draft_vocab),)
            offsets = source.read("d2t", whole, torch.int64)
            head.target_ids = checked_map(offsets, shared.spec.vocab, source.origin)
    if (blocks := blocks_of(ops)) is not None:
        head.fuse(blocks)
    loaded: DraftHead = head
    return loaded


def load_head_spec(path: str | os.PathLike[str], target: ModelSpec) -> HeadSpec:
    """Of the head in a folder, checked as `load_head` checks it, but for what is in its tensors."""
    with _opened(path, target) as (spec, _):
        return spec


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], target: ModelSpec
) -> Iterator[tuple[HeadSpec, SafetensorsSource]]:
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: it is no draft head")
    config = read_json(folder / "config.json")
    with open_safetensors(folder) as source:
        spec = read_spec(config, source.entries, target, source.origin)
        checklist = Checklist()
        KINDS[spec.method](spec, checklist, ReferenceOps(), None)
        _check(checklist, spec, source)
        yield spec, source


def _check(asked: Checklist, spec: HeadSpec, source: SafetensorsSource) -> None:
    """All that the head asks for is there in its shape, and nothing else but the two maps."""
    beside = Checklist()
    beside.expected.update(asked.expected)
    if spec.has_map:
        beside.vector("d2t", spec.draft_vocab)
    if "t2d" in source.entries:
        beside.vector("t2d", spec.layers.vocab)
    beside.check(source)


def shared_with(model: Model) -> Shared:
    """Of a target that holds all of its layers and its whole vocabulary here."""
    spec = model.spec
    assert model.is_first, "the embedding is on another stage: `read_shared`"
    assert model.is_last, "the head is on another stage: `read_shared`"
    assert len(model.vocab_held) == spec.vocab, "ranks share the vocabulary: `read_shared`"
    return Shared(spec, model.head if spec.tied else model.table, model.head)


def read_shared(path: str | os.PathLike[str], ops: Ops, **types: Unpack[Types]) -> Shared:
    """From the target's checkpoint, for a rank that holds only a part of it: what `shared_with`
    gives of one that was loaded with these types. Raises ModelError."""
    dtype, weights = types_of(types)
    with open_checkpoint(pathlib.Path(path)) as (config, source):
        spec = spec_of(config, source, dtype or auto_dtype(source))
        checklist = Checklist()
        Tables(checklist, spec.tied, spec.vocab, spec.hidden)
        reader = Reader(source, ops, numbers_of(spec, weights), ONE_RANK, 0, weights)
        with reader.reading_ahead(checklist, THREADS, None):
            tables = Tables(reader, spec.tied, spec.vocab, spec.hidden)
    return Shared(spec, tables.table, tables.head)


class Tables:
    """A target's two ends."""

    def __init__(self, weights: Weights, is_tied: bool, vocab: int, hidden: int) -> None:
        name = (TABLE if is_tied else HEAD).removesuffix(".weight")
        self.head = weights.linear(Matrix(name, vocab, hidden, coarsest="int8"))
        self.table = self.head if is_tied else weights.table(TABLE, vocab, hidden, WHOLE)
