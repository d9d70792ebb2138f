"""Speculative decoding with a second model, from the configuration to the text."""

import pathlib
from typing import Any

import pytest

from aserve.actors.loading import check_model
from aserve.core.config import Config, Model, Spec
from aserve.testing.tiny import write_tiny_model

from .answers import check_same, finish_all
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
