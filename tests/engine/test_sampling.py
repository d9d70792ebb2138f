"""Each sampling parameter does what it says, through the whole engine and the tiny model."""

import json
import pathlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import safetensors.torch
import torch
import trio

from aserve.actors.completion import Completion, collect
from aserve.actors.engine import Engine, open_engine
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.testing.tiny import write_tiny_model

from .conftest import OpenEngine

PROMPT = "Once upon a time the dog said"


@pytest.fixture
async def engine(open_tiny: OpenEngine) -> AsyncIterator[Engine]:
    async with open_tiny() as engine:
        yield engine


async def finish(engine: Engine, prompt: Any = PROMPT, **params: Any) -> Completion:
    chosen = SamplingParams(**{"max_tokens": 24, "seed": 1} | params)
    generation = engine.generate(prompt, chosen)
    return await collect(generation, generation.prompt_token_ids, chosen)


async def test_a_seed_repeats_and_none_does_not(engine: Engine) -> None:
    seeded = [(await finish(engine)).token_ids for _ in range(2)]
    fresh = [(await finish(engine, seed=None)).token_ids for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert fresh[0] != fresh[1]


async def test_text_is_the_decoding_of_the_tokens_without_specials(engine: Engine) -> None:
    for seed in range(5):
        done = await finish(engine, seed=seed, ignore_eos=True)
        ids = list(done.token_ids)
        assert done.text == engine.tokenizer.decode(ids, skip_special=True)
        whole = await finish(engine, seed=seed, ignore_eos=True, skip_special_tokens=False)
        assert whole.text == engine.tokenizer.decode(ids, skip_special=False)


async def test_a_bias_forces_and_forbids(engine: Engine) -> None:
    forced = await finish(engine, logit_bias={300: 100.0})
    assert set(forced.token_ids) == {300}
    first = (await finish(engine, temperature=0)).token_ids[0]
    other = await finish(engine, temperature=0, logit_bias={first: -100.0})
    assert first not in other.token_ids


async def test_bad_words_do_not_come(engine: Engine) -> None:
    plain = await finish(engine, temperature=0, ignore_eos=True)
    word = engine.tokenizer.decode(list(plain.token_ids[2:3]), skip_special=True)
    assert word.strip()
    clean = await finish(engine, temperature=0, ignore_eos=True, bad_words=(word,))
    assert plain.token_ids[2] not in clean.token_ids


async def test_end_of_text_waits_for_min_tokens_and_may_be_ignored(engine: Engine) -> None:
    eager = {"logit_bias": {2: 100.0}}
    at_once = await finish(engine, **eager)
    assert (at_once.token_ids, at_once.text, at_once.finish_reason) == ((2,), "", "stop")
    assert at_once.stop_reason is None
    later = await finish(engine, min_tokens=7, **eager)
    assert len(later.token_ids) == 8
    assert later.token_ids[-1] == 2
    assert 2 not in later.token_ids[:-1]
    ignored = await finish(engine, ignore_eos=True, **eager)
    assert ignored.token_ids == (2,) * 24
    assert ignored.finish_reason == "length"


async def test_logprobs_are_of_the_raw_logits_and_agree_with_those_of_a_prompt(
    engine: Engine,
) -> None:
    done = await finish(engine, temperature=0.5, top_k=5, logprobs=3, ignore_eos=True)
    assert done.logprobs is not None
    for token, entry in zip(done.token_ids, done.logprobs, strict=True):
        assert entry.token == token
        assert len(entry.top) == 3
        assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
        assert entry.logprob <= entry.top[0][1]
    # The same tokens as a prompt have the same log-probabilities, bit for bit.
    whole = [*done.prompt_token_ids, *done.token_ids]
    read = await finish(engine, whole, prompt_logprobs=3, max_tokens=1)
    assert read.prompt_logprobs is not None
    assert read.prompt_logprobs[0] is None
    assert read.prompt_logprobs[len(done.prompt_token_ids) :] == done.logprobs


async def test_prompt_logprobs_survive_chunks_and_cache_hits(open_tiny: OpenEngine) -> None:
    async with open_tiny(schedule__step_tokens=16, cache__page_size=4) as engine:
        prompt = PROMPT * 6
        first = await finish(engine, prompt, prompt_logprobs=1)
        again = await finish(engine, prompt, prompt_logprobs=1)
        assert first.prompt_logprobs is not None
        assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
        assert again.prompt_logprobs == first.prompt_logprobs


async def test_echo_with_logprobs_gives_those_of_the_prompt(engine: Engine) -> None:
    done = await finish(engine, echo=True, logprobs=1, n=2)
    plain = await finish(engine, prompt_logprobs=1)
    assert done.text.startswith(PROMPT)
    assert done.text == PROMPT + plain.text
    for choice in done.choices:
        assert choice.prompt_logprobs == plain.prompt_logprobs


async def test_a_prompt_of_one_token_has_an_empty_logprob(engine: Engine) -> None:
    assert (await finish(engine, [50], prompt_logprobs=0)).prompt_logprobs == (None,)


@pytest.mark.parametrize("seed", range(4))
async def test_a_schema_gives_json_that_fits(engine: Engine, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "days"],
        "additionalProperties": False,
    }
    structured = StructuredOutput(json=schema)
    done = await finish(
        engine, structured_outputs=structured, max_tokens=200, seed=seed, ignore_eos=seed % 2 == 1
    )
    assert done.finish_reason == "stop"
    value = json.loads(done.text)
    assert set(value) == {"name", "days"}
    assert 0 <= value["days"] <= 9


async def test_choices_regexes_and_grammars_are_kept_to(engine: Engine) -> None:
    for structured, fits in (
        (StructuredOutput(choice=("yes", "no")), lambda text: text in ("yes", "no")),
        (StructuredOutput(regex="[0-9]{3}-[0-9]{2}"), lambda text: len(text) == 6),
        (StructuredOutput(grammar='start: "a"+ "b"'), lambda text: text.strip("a") == "b"),
    ):
        done = await finish(engine, structured_outputs=structured, max_tokens=100, temperature=0.8)
        assert done.finish_reason == "stop"
        assert fits(done.text)


async def test_a_grammar_that_allows_nothing_ends_its_own_request_only(engine: Engine) -> None:
    """The grammar and the bias exclude each other, which only the draw can know."""
    found: list[Completion] = []

    async def other() -> None:
        found.append(await finish(engine, ignore_eos=True))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        structured = StructuredOutput(choice=("yes",))
        banned = (*"yes", "ye", "es", "yes")
        done = await finish(engine, structured_outputs=structured, bad_words=banned)
    assert done.finish_reason == "error"
    assert done.error
    assert len(found[0].token_ids) == 24
    assert engine.ready


async def test_logits_that_are_not_numbers_end_their_own_request_only(
    tmp_path: pathlib.Path,
) -> None:
    path = write_tiny_model(tmp_path / "poisoned")
    weights = safetensors.torch.load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][77] = torch.nan
    safetensors.torch.save_file(weights, path / "model.safetensors")
    async with open_engine(path, compute__threads=1, cache__page_size=4) as engine:
        before = await finish(engine, ignore_eos=True, logit_bias={77: -100.0})
        found: list[Completion] = []

        async def other() -> None:
            found.append(await finish(engine, ignore_eos=True, logit_bias={77: -100.0}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for wanted in (None, 1):
                bad = await finish(engine, [5, 6, 77, 8, 9, 10, 11], prompt_logprobs=wanted)
                assert bad.finish_reason == "error"
                assert "not numbers" in (bad.error or "")
        assert found[0].token_ids == before.token_ids
        # Pages that held it serve others without a trace.
        assert (await finish(engine, ignore_eos=True, logit_bias={77: -100.0})).text == before.text
        assert engine.statistics().planner.kv_pages_used == 0


async def test_chat_messages_and_tools_go_through_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    generation = engine.generate(messages, SamplingParams(max_tokens=1))
    text = engine.tokenizer.decode(list(generation.prompt_token_ids))
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    with_tools = engine.generate(messages, SamplingParams(max_tokens=1), tools=[tool])
    assert '"name": "weather"' in engine.tokenizer.decode(list(with_tools.prompt_token_ids))
