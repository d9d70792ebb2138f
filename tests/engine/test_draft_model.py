"""Speculative decoding with a second model, from the configuration to the text."""

import pathlib
from typing import Any

import pytest

from aserve.actors.completion import Completion
from aserve.actors.loading import check_model
from aserve.core.config import Config, Model, Spec
from aserve.testing.tiny import write_tiny_model

from .answers import TEXT, asked, check_same, finish_all, finish_each
from .conftest import OpenEngine

SHAPES = {"chain": {"depth": 3}, "tree": {"depth": 3, "topk": 3, "tokens": 8}}


def spec(path: pathlib.Path, **more: Any) -> dict[str, Any]:
    given = {"method": "draft", "path": str(path), "adaptive": False} | more
    return {f"spec__{name}": value for name, value in given.items()}


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model of the same tokenizer that says something else."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
async def test_the_text_is_what_it_is_without_drafts_in_fewer_steps(
    open_tiny: OpenEngine, tiny_model_path: pathlib.Path, other_path: pathlib.Path, shape: str
) -> None:
    async with open_tiny() as engine:
        plain = await finish_all(engine)
    steps: list[int] = []
    for path in (other_path, tiny_model_path):
        async with open_tiny(**spec(path, **SHAPES[shape])) as engine:
            drafted = await finish_all(engine)
            statistics = engine.statistics().planner.drafts
        check_same(drafted, plain)
        steps.append(statistics.target_steps)
        assert statistics.target_steps == sum(one.usage.target_steps for one in drafted)
    n_tokens = sum(one.usage.completion_tokens for one in plain)
    assert steps[1] < steps[0] <= n_tokens
    assert steps[1] < 0.5 * n_tokens, "the model knows itself"


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"layout__pp": 2},
    {"layout__pp": 2, "layout__tp": 2},
    {"layout__tp": 2, "layout__dp": 2},
    {"layout__tp": 2, "layout__cp": 2},
    {"cache__page_size": 1},
    {"cache__page_size": 5},
)
# Drafts are cut to what would be idle, or are smaller by themselves.
BATCHES: tuple[dict[str, Any], ...] = (
    {"cache__page_size": 4, "schedule__step_tokens": 16},
    {"schedule__overlap": 0, "schedule__running_max": 3},
    {"spec__adaptive": True},
)


def steps_of(found: list[Completion]) -> list[int]:
    return [one.usage.target_steps for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
async def test_text_and_accepted_lengths_are_those_of_one_rank_in_every_layout_and_batch(
    open_tiny: OpenEngine, tiny_model_path: pathlib.Path, shape: str
) -> None:
    given = spec(tiny_model_path, **SHAPES[shape])
    async with open_tiny(**given) as engine:
        plain = await finish_all(engine)
        again = await finish_all(engine)
        assert engine.statistics().planner.prefix_hit_tokens > 0
    check_same(again, plain)
    assert steps_of(again) == steps_of(plain), "a hit foresees as much"
    for settings in (*LAYOUTS, *BATCHES):
        async with open_tiny(**given | settings) as engine:
            found = await finish_all(engine)
            assert engine.statistics().restarts == 0
        check_same(found, plain)
        if settings in LAYOUTS:
            assert steps_of(found) == steps_of(plain), settings


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
async def test_who_was_retracted_is_drafted_for_again(
    open_tiny: OpenEngine, tiny_model_path: pathlib.Path, shape: str
) -> None:
    crowd = [
        (TEXT[: 4 + seed], asked(seed=seed, temperature=0.8 * (seed % 2), max_tokens=140))
        for seed in range(8)
    ]
    async with open_tiny() as engine:
        plain = await finish_each(engine, crowd)
    small = {"cache__page_size": 4, "cache__kv_tokens": 260}
    async with open_tiny(**spec(tiny_model_path, **SHAPES[shape]) | small) as engine:
        found = await finish_each(engine, crowd)
        statistics = engine.statistics().planner
    check_same(found, plain)
    assert statistics.retractions > 0
    assert statistics.drafts.accepted > statistics.drafts.target_steps


def refusal(model: pathlib.Path, path: pathlib.Path | str | None) -> str:
    config = Config(
        model=Model(path=str(model)), spec=Spec(method="draft", path=path and str(path))
    )
    findings = check_model(config)
    assert findings
    return "; ".join(findings)


def test_a_model_that_drafts_must_be_named(tiny_model_path: pathlib.Path) -> None:
    assert "give spec.path a smaller model" in refusal(tiny_model_path, None)
    assert "there is no model 'nowhere'" in refusal(tiny_model_path, "nowhere")


def test_a_model_of_another_tokenizer_is_refused_with_both_names(
    tiny_model_path: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    larger = write_tiny_model(tmp_path / "larger", vocab=400)
    words = refusal(tiny_model_path, larger)
    assert f"{larger} has 400 tokens, {tiny_model_path} 384" in words
    renamed = write_tiny_model(tmp_path / "renamed")
    tokenizer = renamed / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|finish|>"))
    words = refusal(tiny_model_path, renamed)
    assert f"token 2 is '<|finish|>' in {renamed} and '<|im_end|>' in {tiny_model_path}" in words
    plain = write_tiny_model(tmp_path / "plain")
    tokenizer = plain / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"special": true', '"special": false', 1))
    assert f"token 0 is special in {tiny_model_path} only" in refusal(tiny_model_path, plain)


def test_a_model_of_the_same_tokenizer_is_accepted(
    tiny_model_path: pathlib.Path, other_path: pathlib.Path
) -> None:
    config = Config(
        model=Model(path=str(tiny_model_path)), spec=Spec(method="draft", path=str(other_path))
    )
    assert check_model(config) == ()
