"""Draft heads beside a model, all of it real: the same text, and below it the same drafts, whatever
the layout, the chunks, the pages and the cache."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from aserve.actors.completion import Completion
from aserve.core.config import Spec
from aserve.core.message import Drafting
from aserve.core.tree import Draft
from aserve.errors import ConfigError, ModelError
from aserve.models.fetch import Progress
from aserve.models.regions import Region
from aserve.runner import drafting as methods
from aserve.runner.drafter import Drafter, DraftModel, Kept
from aserve.runner.drafting import Target
from aserve.tensor.ops import KvLayer
from tests.models import heads

from .answers import LAYOUTS, TEXT, asked, check_same, finish_all, finish_each
from .conftest import OpenEngine

VOCAB = 384  # of the tiny model
HEADS: dict[str, Callable[[], tuple[dict[str, Any], heads.Tensors]]] = {
    "eagle": lambda: heads.eagle(vocab=VOCAB),
    "eagle3": lambda: heads.eagle3((0, 1, 1), vocab=VOCAB),
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"spec__depth": 3, "spec__topk": 1},
    "tree": {"spec__depth": 3, "spec__topk": 3, "spec__tokens": 8},
}
Place = tuple[tuple[int, ...], int, Drafting]  # the text so far, the seed it is drawn with


class Watched:
    """Every draft by the text it is below: drafts below the same text must be the same.

    `again` are those that were, `other` those that were not.
    """

    def __init__(self) -> None:
        self.drafts: dict[Place, Draft] = {}
        self.again, self.other = 0, list[Place]()

    def open(self, spec: Spec, target: Target, progress: Progress) -> "WatchedModel":
        return WatchedModel(self, methods._eagle(spec, target, progress))

    def saw(self, one: Kept, drafting: Drafting, draft: Draft) -> None:
        state = one.view.state
        text = (*state.tokens[: one.view.start + 1], *one.tokens)
        assert len(text) == one.view.start + 1 + len(one.tokens)
        seed = state.sampling.seed if state.sampling.temperature else 0
        place = text, seed, drafting
        self.again += place in self.drafts
        if self.drafts.setdefault(place, draft) != draft:
            self.other.append(place)

    def check(self, known_min: float) -> None:
        """More than so many were known since the last check, and none was another."""
        assert not self.other, (len(self.other), self.other[0])
        assert self.again > known_min
        self.again = 0


class WatchedModel:
    def __init__(self, watched: Watched, model: DraftModel) -> None:
        self.watched, self.model = watched, model
        self.pages_beside = model.pages_beside

    def regions(self) -> tuple[Region, ...]:
        return self.model.regions()

    def drafter(self, kv: Sequence[KvLayer]) -> "WatchedDrafter":
        for layer in kv:  # what is read before it is written shows
            layer.k_PSHD.fill_(float("nan"))
            layer.v_PSHD.fill_(float("nan"))
        return WatchedDrafter(self.watched, self.model.drafter(kv))


class WatchedDrafter:
    def __init__(self, watched: Watched, drafter: Drafter) -> None:
        self.watched, self.drafter = watched, drafter
        self.drop = drafter.drop

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        drafts = self.drafter.draft(kept, features, drafting)
        for one, draft in zip(kept, drafts, strict=True):
            wanted = one.is_drawn and drafting.tokens > 0
            assert bool(draft.tokens) == wanted
            if wanted:
                self.watched.saw(one, drafting, draft)
        return drafts


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr(methods, "METHODS", dict.fromkeys(HEADS, watched.open))
    return watched


def settings_of(method: str, shape: str, folder: pathlib.Path, **more: Any) -> dict[str, Any]:
    path = str(heads.write(folder / method, *HEADS[method]()))
    asked = {"spec__method": method, "spec__path": path, "spec__adaptive": False}
    return asked | SHAPES[shape] | {"cache__page_size": 8} | more


async def plain(open_tiny: OpenEngine) -> list[Completion]:
    async with open_tiny() as engine:
        return await finish_all(engine)


@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_a_head_changes_no_text(
    open_tiny: OpenEngine, watched: Watched, tmp_path: pathlib.Path, method: str, shape: str
) -> None:
    alone = await plain(open_tiny)
    async with open_tiny(**settings_of(method, shape, tmp_path)) as engine:
        found = await finish_all(engine)
        statistics = engine.statistics().planner
    check_same(found, alone)
    assert statistics.drafts.drafts > 100
    assert statistics.kv_pages_used == 0


OTHERS: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "chunks": {"schedule__step_tokens": 16},
    "chunks of any length": {"schedule__step_tokens": 37, "cache__page_size": 4},
    "pages of one token": {"cache__page_size": 1},
    "two threads": {"compute__threads": 2},
    "one operation at a time": {"compute__fused": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
async def test_drafts_are_the_same_in_every_layout_and_batch(
    open_tiny: OpenEngine, watched: Watched, tmp_path: pathlib.Path, method: str, shape: str
) -> None:
    alone = await plain(open_tiny)
    settings = settings_of(method, shape, tmp_path, schedule__prefix_cache=False)
    async with open_tiny(**settings, schedule__step_tokens=512) as engine:
        await finish_all(engine)
    watched.again, known = 0, len(watched.drafts)
    for other in OTHERS.values():
        async with open_tiny(**settings | other) as engine:
            check_same(await finish_all(engine), alone)
        watched.check(0.8 * known)


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
async def test_drafts_are_the_same_on_cache_hits(
    open_tiny: OpenEngine, watched: Watched, tmp_path: pathlib.Path, method: str
) -> None:
    """Also where a text leaves the cached one right behind a page, inside of it, or goes on."""
    settings = settings_of(method, "tree", tmp_path, cache__page_size=4)
    texts = []
    for first in range(100, 300, 20):
        one, other = list(range(first, first + 12)), list(range(first + 60, first + 72))
        for length, end in ((12, 12), (4, 6), (4, 9), (6, 9), (8, 9), (8, 12)):
            texts.append((one[:length] + other[length:end], asked(temperature=0, max_tokens=4)))
    async with open_tiny(**settings, schedule__prefix_cache=False) as engine:
        alone = await finish_each(engine, texts)
    async with open_tiny(**settings) as engine:
        for one, other in zip(texts, alone, strict=True):
            check_same(await finish_each(engine, [one]), [other])
            check_same(await finish_each(engine, [one]), [other])
        assert engine.statistics().planner.prefix_hit_tokens > 100
    watched.check(200)


@pytest.mark.slow
@pytest.mark.parametrize("method", HEADS)
async def test_drafts_are_the_same_after_retraction(
    open_tiny: OpenEngine, watched: Watched, tmp_path: pathlib.Path, method: str
) -> None:
    settings = settings_of(method, "tree", tmp_path, cache__page_size=4)
    crowd = [
        (TEXT[: 4 + seed], asked(seed=seed, temperature=0.8 * (seed % 3), max_tokens=140))
        for seed in range(10)
    ]
    async with open_tiny(**settings) as engine:
        alone = await finish_each(engine, crowd)
    async with open_tiny(**settings, cache__kv_tokens=260) as engine:
        check_same(await finish_each(engine, crowd), alone)
        assert engine.statistics().planner.retractions > 0
    watched.check(100)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spec__method": "eagle3", "spec__path": None}, "aserve train-draft"),
        ({"spec__method": "eagle3"}, "spec.method is eagle3, the head .* is one of eagle:"),
        ({"spec__path": "/nowhere"}, "/nowhere has no config.json: it is no draft head"),
    ],
)
async def test_a_head_that_does_not_fit_is_refused_before_ranks_start(
    open_tiny: OpenEngine, tmp_path: pathlib.Path, settings: dict[str, Any], words: str
) -> None:
    asked = settings_of("eagle", "chain", tmp_path) | settings
    with pytest.raises((ConfigError, ModelError), match=words):
        async with open_tiny(**asked):
            pytest.fail("it opened")


async def test_a_head_of_another_size_is_refused_with_both_values(
    open_tiny: OpenEngine, tmp_path: pathlib.Path
) -> None:
    asked = settings_of("eagle", "chain", tmp_path)
    config, tensors = heads.eagle(vocab=300)
    heads.write(pathlib.Path(asked["spec__path"]), config, tensors)
    with pytest.raises(ModelError, match="a vocabulary of 300 tokens, the target has 384"):
        async with open_tiny(**asked):
            pytest.fail("it opened")
