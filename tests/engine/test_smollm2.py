"""SmolLM2 in float32 says greedily what transformers says with the same dequantised weights."""

import pathlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
import transformers

from aserve.actors.completion import collect
from aserve.actors.engine import Engine, open_engine
from aserve.core.admission import RATIO_ONE, RATIO_START
from aserve.core.request import SamplingParams
from aserve.models.weights.gguf import GgufSource
from aserve.text.gguf_file import open_gguf
from aserve.text.tokenizer import load_tokenizer

from .answers import finish_each

pytestmark = pytest.mark.slow

N_TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "Water boils at 100 degrees and freezes at 0 degrees, so in winter the lake behind our house "
    "turns to ice, and the children of the village come to skate on it. The oldest of them",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
)
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS)


@pytest.fixture(scope="module")
def expected(smollm2_path: pathlib.Path) -> list[list[int]]:
    """Token ids by transformers' own loop and arithmetic, one prompt at a time."""
    source = GgufSource(open_gguf(smollm2_path))
    config = transformers.LlamaConfig(
        **{name: value for name, value in source.config.items() if value is not None}
    )
    model = transformers.LlamaForCausalLM(config)
    weights = {
        name: source.read(name, tuple(slice(0, n) for n in entry.shape), torch.float32)
        for name, entry in source.entries.items()
    }
    missing, surplus = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"}
    assert not surplus
    model.tie_weights()
    model.eval()
    tokenizer = load_tokenizer(smollm2_path)
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=N_TOKENS,
                do_sample=False,
                eos_token_id=list(tokenizer.eos_ids),
                pad_token_id=0,
            )
        found.append(out[0, ids.shape[1] :].tolist())
    return found


@asynccontextmanager
async def opened(path: pathlib.Path, **overrides: Any) -> AsyncIterator[Engine]:
    settings = {"model__dtype": "float32", "cache__kv_tokens": 4096} | overrides
    async with open_engine(path, **settings) as engine:
        yield engine


async def finish(engine: Engine, prompt: str) -> list[int]:
    generation = engine.generate(prompt, GREEDY)
    done = await collect(generation, generation.prompt_token_ids, GREEDY)
    return list(done.token_ids)


async def finish_all(engine: Engine) -> list[list[int]]:
    done = await finish_each(engine, [(prompt, GREEDY) for prompt in PROMPTS])
    return [list(one.token_ids) for one in done]


async def test_alone_and_again_on_cache_hits(
    smollm2_path: pathlib.Path, expected: list[list[int]]
) -> None:
    async with opened(smollm2_path, cache__page_size=4) as engine:
        for _ in range(2):
            assert [await finish(engine, prompt) for prompt in PROMPTS] == expected
        assert engine.statistics().planner.prefix_hit_tokens > 0


async def test_in_chunks_and_in_a_mixed_batch(
    smollm2_path: pathlib.Path, expected: list[list[int]]
) -> None:
    async with opened(smollm2_path, schedule__step_tokens=16) as engine:
        assert await finish_all(engine) == expected


async def test_after_retraction(smollm2_path: pathlib.Path, expected: list[list[int]]) -> None:
    """All come in at once, since the pool holds what they are expected to need; and as they decode
    side by side to the same length it must run out, since it does not hold what they do need.
    """
    long = [at for at, text in enumerate(expected) if len(text) == N_TOKENS]
    tokenizer = load_tokenizer(smollm2_path)
    known = [tokenizer.encode(PROMPTS[at]) for at in long]
    assert len({tokens[0] for tokens in known}) == len(long) > 1  # they share no page
    kv_len = sum(map(len, known))
    future_len = -(-N_TOKENS * RATIO_START // RATIO_ONE)
    pages = kv_len + len(long) * (future_len - 1)
    assert pages < kv_len + len(long) * (N_TOKENS - 1)
    settings = {"cache__page_size": 1, "cache__kv_tokens": pages}
    async with opened(smollm2_path, **settings) as engine:
        done = await finish_each(engine, [(PROMPTS[at], GREEDY) for at in long])
        assert [list(one.token_ids) for one in done] == [expected[at] for at in long]
        assert engine.statistics().planner.retractions > 0
