"""Which `spec.method` is which drafter: a row each."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from aserve.core.config import Spec
from aserve.models.fetch import Progress
from aserve.models.registry import Model
from aserve.runner.drafter import DraftModel
from aserve.runner.ngram import NgramModel


class Target(NamedTuple):
    """What is drafted for: a leader's share of it, and where its checkpoint is."""

    model: Model
    path: str


Open = Callable[[Spec, Target, Progress], DraftModel]


def _ngram(spec: Spec, target: Target, progress: Progress) -> DraftModel:
    return NgramModel(spec.ngram_min, spec.ngram_max)


METHODS: Mapping[str, Open] = {"ngram": _ngram}


def open_draft_model(spec: Spec, target: Target, progress: Progress) -> DraftModel | None:
    """What the rank that `target.model` was loaded for drafts with; None: it does not.

    Raises ModelError, ConfigError.
    """
    model = target.model
    if spec.method == "none" or model.rank != model.grid.leader(model.grid.place(model.rank).dp):
        return None
    return METHODS[spec.method](spec, target, progress)
