"""SmolLM2 says the same in every layout, in threads and in processes, greedily and by seed."""

import pathlib
from typing import Any

import pytest
import trio

from aserve.actors.completion import collect
from aserve.actors.engine import open_engine
from aserve.core.request import SamplingParams

pytestmark = pytest.mark.slow

Texts = list[tuple[int, ...]]

N_TOKENS = 12
PARAMS = (
    SamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=11, max_tokens=N_TOKENS, ignore_eos=True),
)
STORY = (
    "The old lighthouse keeper climbed the stairs every evening, counting them under his breath. "
    "There were two hundred and four, and he had never once got a different number, until today. "
)
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "The",
    STORY,
    STORY * 4,
    STORY + "He counted again, and this time he",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "Roses are red,\nviolets are",
    "import os\nimport sys\n\ndef main(",
    "Q: What is the largest planet?\nA:",
    "In 1969, humans first",
    "Ingredients: flour, sugar, butter,",
    '{"name": "Ada", "born":',
    "Der schnelle braune Fuchs",
    "A list of prime numbers: 2, 3, 5, 7,",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "tp 3": {"tp": 3},
    "pp 2": {"pp": 2},
    "pp 3": {"pp": 3},
    "pp 2 x tp 3": {"pp": 2, "tp": 3},
    "dp 3": {"tp": 3, "dp": 3},
    "cp 3": {"tp": 3, "cp": 3},
}


async def said(path: pathlib.Path, live: str, **layout: int) -> list[Texts]:
    """Token ids for every prompt, all asked at once, greedily and then by seed."""
    settings: dict[str, Any] = {f"layout__{axis}": size for axis, size in layout.items()}
    settings |= {"schedule__step_tokens": 96, "cache__kv_tokens": 8192, "ranks__live": live}
    found: list[Texts] = []
    async with open_engine(path, **settings) as engine:
        for params in PARAMS:
            texts: Texts = [()] * len(PROMPTS)

            async def ask(at: int, params: SamplingParams = params, texts: Texts = texts) -> None:
                answer = engine.submit(PROMPTS[at], params)
                done = await collect(answer, answer.prompt_token_ids, params)
                texts[at] = tuple(done.choices[0].token_ids)

            async with trio.open_nursery() as nursery:
                for at in range(len(PROMPTS)):
                    nursery.start_soon(ask, at)
            found.append(texts)
    return found


@pytest.fixture(scope="module")
def one_rank(smollm2_path: pathlib.Path) -> list[Texts]:
    texts: list[Texts] = trio.run(said, smollm2_path, "auto")
    assert all(len(text) == N_TOKENS for kind in texts for text in kind)
    assert texts[0] != texts[1]
    return texts


@pytest.mark.parametrize("live", ["thread", "process"])
@pytest.mark.parametrize("name", LAYOUTS)
async def test_every_layout_says_what_one_rank_says(
    name: str, live: str, smollm2_path: pathlib.Path, one_rank: list[Texts]
) -> None:
    texts = await said(smollm2_path, live, **LAYOUTS[name])
    for kind, right in zip(texts, one_rank, strict=True):
        assert kind == right
