"""Drafts as they are served: the acceptance that the offline evaluation foresees, step by step."""

import pathlib
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from aserve.core.message import Drafting
from aserve.models.eagle_loading import load_head, shared_with
from aserve.models.eagle_spec import DraftHead
from aserve.models.registry import load_model
from aserve.runner.eagle_drafter import EagleModel, features_of
from aserve.runner.kv_store import KvStore
from aserve.tensor.blocks import DraftRoots
from aserve.tensor.ops import open_ops
from aserve.tensor.tree import Noise
from aserve.training.acceptance import Measured, TreeShape, measure
from tests.models import heads
from tests.models.drafting import Serving, Told
from tests.models.families import saved
from tests.training.texts import PROMPT_LEN, Oracle

PAGES = 160
SHAPES = {
    "chain": TreeShape(1, 2, 4),
    "tree": TreeShape(3, 2, 8),
    "wide tree": TreeShape(4, 3, 16),
    "one level": TreeShape(4, 0, 4),
}
METHODS = ("eagle", "eagle3")


def drafting_of(shape: TreeShape) -> Drafting:
    """The same in the words of a plan."""
    return Drafting(shape.depth + 1, shape.width, shape.tokens - 1)


@pytest.fixture(scope="module", params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


def served(
    oracle: Oracle, folder: pathlib.Path, kernels: str, most: Drafting, page_size: int = 4
) -> tuple[DraftHead, Serving]:
    ops = open_ops(kernels, 1)  # type: ignore[arg-type]
    shared = shared_with(load_model(saved("llama")[0], ops=ops))
    head = load_head(heads.write(folder, oracle.config, oracle.w), shared, ops)
    model = EagleModel(head, ops, most, 3, page_size)
    kv = KvStore(model.regions(), page_size, PAGES + model.pages_beside)
    for layer in kv.layers:  # what is read before it is written shows
        layer.k_PSHD.fill_(torch.nan)
        layer.v_PSHD.fill_(torch.nan)
    pages = random.Random(3).sample(range(PAGES), PAGES)
    return head, Serving(model.drafter(kv.layers), features_of(head.spec), page_size, pages)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_is_accepted_is_what_was_measured_offline(
    method: str, name: str, page_size: int, kernels: str, tmp_path: pathlib.Path
) -> None:
    oracle, shape = Oracle(method), SHAPES[name]
    pairs = [oracle.text(seed, length) for seed, length in enumerate((17, 26, 21))]
    drafting = drafting_of(shape)
    head, serving = served(oracle, tmp_path, kernels, drafting, page_size)
    # What comes after the end of a text is not looked at.
    told = [Told(n, [*one.tokens, 0], seen.features_TF) for n, (one, seen) in enumerate(pairs)]
    found = [Measured() for _ in told]
    # The second starts while the first decodes, and comes in two chunks.
    serving.step([(told[0], PROMPT_LEN)], drafting)
    serving.step([(told[1], 2), (told[0], 0)], drafting, draws=False)
    before = told[0].kv_len
    serving.step([(told[0], 0), (told[1], PROMPT_LEN - 2), (told[2], PROMPT_LEN)], drafting)
    assert told[0].kv_len == before + 1  # it had no draft
    while going := [one for one in told if one.kv_len + 2 < len(one.ids)]:
        left = [len(one.ids) - 2 - one.kv_len for one in going]
        counts = serving.step([(one, 0) for one in going], drafting)
        for one, count, most in zip(going, counts, left, strict=True):
            found[one.seq].add(min(count - 1, most), min(count, most))
    for n in (1, 2):
        assert found[n] == measure(head, [pairs[n]], shape)
        assert found[n].per_step > 1


Wrong = Callable[[DraftRoots], DraftRoots]
SIZE = Drafting(3, 2, 5)
REFUSED: dict[str, tuple[Wrong, Drafting]] = {
    "more trees than there are pages for": (lambda r: replace(r, first_page=PAGES + 4), SIZE),
    "page 999 is outside": (lambda r: replace(r, page_table_NP=r.page_table_NP * 0 + 999), SIZE),
    "longer than its pages": (lambda r: replace(r, lengths_N=r.lengths_N * 0 + 12), SIZE),
    "larger than its pages": (lambda r: replace(r, pages_each=1), SIZE),
    "deeper than there are positions": (lambda r: replace(r, lengths_N=r.lengths_N + 1), SIZE),
    "more children than tokens": (lambda r: r, Drafting(1, 49, 49)),
    "chooses among fewer": (lambda r: replace(r, noise=NOISE, most=1), SIZE),
    "rows and logits of others": (lambda r: replace(r, logits_NV=r.logits_NV[:, 1:]), SIZE),
    "seeds are torch.int32": (
        lambda r: replace(r, noise=replace(NOISE, seeds_R=NOISE.seeds_R.int()), most=8),
        SIZE,
    ),
}
NOISE = Noise(torch.zeros(2).long(), torch.zeros(2).int(), torch.ones(2))


@pytest.mark.parametrize("words", REFUSED)
def test_a_growth_that_reaches_outside_is_refused(words: str, tmp_path: pathlib.Path) -> None:
    most = Drafting(3, 4, 9)
    head, _ = served(Oracle("eagle3"), tmp_path, "native", most)
    assert head.fused is not None
    model = EagleModel(head, open_ops("native", 1), most, 2, 4)
    kv = KvStore(model.regions(), 4, PAGES + model.pages_beside)
    tables, lengths = torch.arange(6).int().view(2, 3), torch.tensor([9, 3]).int()
    rows, logits = torch.randn(2, heads.HIDDEN), torch.randn(2, heads.DRAFT_VOCAB)
    each = model.pages_beside // 2
    roots = DraftRoots(rows, logits, tables, lengths, PAGES, each)
    block, rope = head.fused.block, head.rotary.upto(1)  # type: ignore[attr-defined]
    rope = replace(rope, cos_sin_PR=rope.cos_sin_PR[:12].clone())
    whole = block.grow(kv.layers[0], rope, roots, SIZE)
    assert [part.shape for part in whole] == [(2, 5), (2, 5)]
    wrong, size = REFUSED[words]
    with pytest.raises(ValueError, match=words):
        block.grow(kv.layers[0], rope, wrong(roots), size)
