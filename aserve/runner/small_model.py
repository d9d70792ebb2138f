"""Which model may draft for which, and the one that does, as a rank opens it."""

import pathlib
from collections.abc import Sequence

from aserve.core.config import Accept, Spec
from aserve.core.message import Drafting
from aserve.errors import ConfigError, ModelError
from aserve.models import fetch
from aserve.models.regions import Region
from aserve.models.registry import Model, load_spec
from aserve.runner.draft_model import ModelDrafter
from aserve.runner.growing import Scratch, pages_below
from aserve.tensor.ops import KvLayer
from aserve.text.tokenizer import Tokenizer, load_tokenizer


class SmallModel:
    """`DraftModel` of a second model, whole, for drafts of up to `sequences` at once.

    Pages of its KV have the target's numbers; those for drafts come after them.
    """

    def __init__(
        self,
        model: Model,
        most: Drafting,
        sequences: int,
        page_size: int,
        target_vocab: int,
        accept: Accept = "noise",
    ) -> None:
        self._model, self._page_size, self._target_vocab = model, page_size, target_vocab
        self._accept: Accept = accept
        self._each = 1 + pages_below(page_size, most)  # the last one is for a root
        self.pages_beside = self._each * sequences

    def regions(self) -> tuple[Region, ...]:
        return self._model.regions()

    def drafter(self, kv: Sequence[KvLayer]) -> ModelDrafter:
        first = len(kv[0].k_PSHD) - self.pages_beside
        scratch = Scratch(self._model.ops, kv, first, self._each, self._page_size)
        return ModelDrafter(self._model, kv, scratch, self._target_vocab, self._accept)


def is_here(spec: Spec) -> bool:
    """Whether `check_small_model` has nothing to download."""
    return spec.method != "draft" or not spec.path or fetch.resolve_here(spec.path) is not None


def check_small_model(
    spec: Spec, tokenizer: Tokenizer, target: str, progress: fetch.Progress
) -> None:
    """Before weights are loaded. Raises ConfigError, ModelError."""
    if spec.path is None:
        raise ConfigError(
            "spec.method draft needs a model that drafts: give spec.path a smaller model of the "
            f"tokenizer of {target}"
        )
    path = fetch.resolve(spec.path, progress)
    if found := misfits(path, tokenizer, target):
        raise ModelError([f"{path} cannot draft for {target}:", *found])


def misfits(path: pathlib.Path, tokenizer: Tokenizer, target: str) -> list[str]:
    """Everything in which the tokenizer of the model at `path` is not that of `target`.

    Raises ModelError where there is no model.
    """
    load_spec(path)
    own = load_tokenizer(path)
    found: list[str] = []
    if own.vocab_size != tokenizer.vocab_size:
        found.append(f"{path} has {own.vocab_size} tokens, {target} {tokenizer.vocab_size}")
    known = {number: text for text, number in own.hf.get_vocab().items()}
    wanted = {number: text for text, number in tokenizer.hf.get_vocab().items()}
    differ = sorted(n for n in known.keys() & wanted.keys() if known[n] != wanted[n])
    if differ:
        first = differ[0]
        found.append(
            f"{len(differ)} tokens differ: token {first} is {known[first]!r} in {path} and "
            f"{wanted[first]!r} in {target}"
        )
    special = [
        f"token {number} is special in {there} only"
        for number in sorted(known.keys() & wanted.keys())
        if own.is_special(number) != tokenizer.is_special(number)
        for there in [path if own.is_special(number) else target]
    ]
    if special:
        found.append(f"{len(special)} tokens are special in one only: {special[0]}")
    return found
