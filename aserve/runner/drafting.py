"""Which `spec.method` is which drafter: a row each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from aserve.core.config import Spec
from aserve.core.speculation import speculation_of
from aserve.errors import ConfigError
from aserve.models.eagle_loading import load_head, read_shared, shared_with
from aserve.models.eagle_spec import Method
from aserve.models.fetch import Progress, resolve
from aserve.models.registry import Model, Types, load_model
from aserve.models.shipped import find_head
from aserve.models.spec import ModelSpec
from aserve.runner.drafter import DraftModel
from aserve.runner.eagle_drafter import EagleModel, features_of
from aserve.runner.ngram import NgramModel
from aserve.runner.small_model import SmallModel, check_small_model
from aserve.text.tokenizer import Tokenizer


class Target(NamedTuple):
    """What is drafted for: a rank's share of it, where its checkpoint is and as which types it was
    read, the size of a page, and how many sequences of a group may run at once."""

    model: Model
    path: str
    types: Types
    page_size: int
    sequences_max: int


Open = Callable[[Spec, Target, Progress], DraftModel]


def _ngram(spec: Spec, target: Target, progress: Progress) -> DraftModel:
    return NgramModel(spec.ngram_min, spec.ngram_max)


def _eagle(spec: Spec, target: Target, progress: Progress) -> DraftModel:
    model = target.model
    folder, _ = find_head(cast(Method, spec.method), spec.path, model.spec)
    is_whole = model.is_first and model.is_last and len(model.vocab_held) == model.spec.vocab
    ops = model.ops
    shared = shared_with(model) if is_whole else read_shared(target.path, ops, **target.types)
    # Half the bytes of bfloat16 to read for each level, and next to nothing of what it foresees.
    head = load_head(folder, shared, ops, progress, "int8")
    most = speculation_of(spec).most
    return EagleModel(head, ops, most, target.sequences_max, target.page_size, spec.accept)


def _draft(spec: Spec, target: Target, progress: Progress) -> DraftModel:
    assert spec.path is not None
    ops, vocab = target.model.ops, target.model.spec.vocab
    model = load_model(resolve(spec.path, progress), ops=ops, progress=progress)
    most = speculation_of(spec).most
    sequences, size = target.sequences_max, target.page_size
    return SmallModel(model, most, sequences, size, vocab, spec.accept)


METHODS: Mapping[str, Open] = {
    "ngram": _ngram,
    "draft": _draft,
    "eagle": _eagle,
    "eagle3": _eagle,
}


def check_drafts(
    spec: Spec, target: ModelSpec, tokenizer: Tokenizer, name: str, progress: Progress
) -> None:
    """Raises ConfigError or ModelError where what drafts does not fit the target, which people call
    `name`, without its weights."""
    if spec.method not in ("none", *METHODS):
        raise ConfigError(
            f"spec.method is {spec.method}, which is not in this release: use one of "
            f"{', '.join(METHODS)}"
        )
    if spec.method == "ngram" and spec.ngram_min > spec.ngram_max:
        raise ConfigError(
            f"spec.ngram_min is {spec.ngram_min}, more than spec.ngram_max, {spec.ngram_max}"
        )
    if spec.method == "draft":
        check_small_model(spec, tokenizer, name, progress)
    wanted_features(spec, target)


def wanted_features(spec: Spec, target: ModelSpec) -> tuple[str, ...]:
    """What of a target's rows drafts are made of."""
    if spec.method not in ("eagle", "eagle3"):
        return ()
    return features_of(find_head(cast(Method, spec.method), spec.path, target)[1])


def open_draft_model(spec: Spec, target: Target, progress: Progress) -> DraftModel | None:
    """What the rank that `target.model` was loaded for drafts with; None: it does not. From then on
    the model keeps what drafts are made of, on every rank.

    Raises ModelError, ConfigError.
    """
    model = target.model
    if spec.method == "none":
        return None
    model.capture(wanted_features(spec, model.spec))
    if model.rank != model.grid.leader(model.grid.place(model.rank).dp):
        return None
    return METHODS[spec.method](spec, target, progress)
