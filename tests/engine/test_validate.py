"""What is refused before anything runs, and that the refusal names the parameter."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from aserve.actors.completion import collect
from aserve.actors.engine import Engine
from aserve.actors.validate import Facts, check_params, check_prompt
from aserve.core.config import Limits
from aserve.core.request import SamplingParams, StructuredOutput
from aserve.errors import RequestError

from .conftest import OpenEngine

FACTS = Facts(context_len=100, vocab_size=384, limits=Limits())


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "5"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", None),
        ("temperature", "warm"),
        ("top_k", -2),
        ("top_k", 0.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.nan),
        ("seed", 2**64),
        ("temperature", 10**400),
        ("logit_bias", {5: 10**400}),
        ("seed", 1.0),
        ("n", 0),
        ("n", 65),
        ("n", 10**9),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [5]),
        ("stop", 5),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("stop_token_ids", [384]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logit_bias", {384: 1.0}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", [5]),
        ("logit_bias", {token: 1.0 for token in range(1025)}),
        ("ignore_eos", 1),
        ("echo", "yes"),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_a_bad_value_is_refused_by_name(param: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_params(SamplingParams(**{param: value}), FACTS)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in str(caught.value)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("seed", lambda huge: -huge),
        ("max_tokens", lambda huge: huge),
        ("temperature", lambda huge: huge),
        ("stop_token_ids", lambda huge: [huge]),
        ("logit_bias", lambda huge: {huge: 1}),
        ("logit_bias", lambda huge: {5: huge}),
    ],
)
def test_integers_too_long_to_write_are_refused_too(
    param: str, value: Callable[[int], Any]
) -> None:
    with pytest.raises(RequestError, match=f"{param} .*far beyond"):
        check_params(SamplingParams(**{param: value(10**5000)}), FACTS)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, temperature=0, top_k=-1, seed=-(2**63), stop="x"),
        SamplingParams(stop=["a", "b"], logit_bias={0: -100, 383: 100}, bad_words=["a"]),
        SamplingParams(n=64, logprobs=20, prompt_logprobs=0, top_p=1e-9, min_p=1),
    ],
)
def test_every_bound_itself_is_allowed(params: SamplingParams) -> None:
    check_params(params, FACTS)


def test_a_prompt_leaves_room_or_is_refused() -> None:
    assert check_prompt([1] * 90, SamplingParams(max_tokens=10), FACTS) == 10
    assert check_prompt([1] * 90, SamplingParams(max_tokens=None), FACTS) == 10
    for length, params in (
        (91, SamplingParams(max_tokens=10)),
        (100, SamplingParams(max_tokens=None)),
        (1000, SamplingParams(max_tokens=1)),
        (95, SamplingParams(max_tokens=None, min_tokens=6)),
    ):
        with pytest.raises(RequestError, match="maximum context length is 100 tokens") as caught:
            check_prompt([1] * length, params, FACTS)
        assert caught.value.code == "context_length_exceeded"


@pytest.fixture
async def engine(open_legible: OpenEngine) -> Any:
    async with open_legible() as engine:
        yield engine


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([384], "prompt"),
        ([-1], "prompt"),
        ([1.0], "prompt"),
        ([True], "prompt"),
        (["a"], "prompt"),
        (b"bytes", "prompt"),
        (None, "prompt"),
        ({"role": "user"}, "prompt"),
        ("\ud800", "prompt"),
        ("x" * 10_000_000, "prompt"),
        ([1, {"role": "user"}], "prompt"),
        ([{"role": "user"}, 1], "prompt"),
    ],
)
async def test_a_bad_prompt_is_refused(engine: Engine, prompt: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        engine.generate(prompt, SamplingParams())
    assert caught.value.status == 400
    assert caught.value.param == param
    assert engine.statistics().planner.waiting == 0


async def test_a_priority_has_a_range(engine: Engine) -> None:
    for priority in (2**40, 1.5, "high", None, True):
        with pytest.raises(RequestError) as caught:
            engine.generate("a", priority=priority)
        assert caught.value.param == "priority"


@pytest.mark.parametrize(
    "structured",
    [
        StructuredOutput(),
        StructuredOutput(regex="("),
        StructuredOutput(regex="a", json_object=True),
        StructuredOutput(json='{"type": "obj'),
        StructuredOutput(json={"type": "object", "x": math.nan}),
        StructuredOutput(json={"a": object()}),
        StructuredOutput(grammar="not lark"),
        StructuredOutput(regex="a" * 70_000),
    ],
)
async def test_a_bad_grammar_is_refused_early_and_late(
    engine: Engine, structured: StructuredOutput
) -> None:
    params = SamplingParams(structured_outputs=structured)
    with pytest.raises(RequestError) as checked:
        await engine.check(params)
    with pytest.raises(RequestError) as submitted:
        engine.generate("a", params)
    assert checked.value.status == submitted.value.status == 400
    assert checked.value.param == submitted.value.param == "structured_outputs"


async def test_a_salt_is_a_short_string(engine: Engine) -> None:
    for salt in (5, None, "x" * 257):
        with pytest.raises(RequestError) as caught:
            engine.generate("a", cache_salt=salt)
        assert caught.value.param == "cache_salt"


async def test_without_max_tokens_a_small_pool_bounds_the_output(open_legible: OpenEngine) -> None:
    async with open_legible(pages=8) as engine:
        endless = SamplingParams(max_tokens=None, ignore_eos=True)
        done = await collect(engine.generate([1] * 20, endless), (), endless)
        assert len(done.token_ids) == 8 * 4 + 1 - 20
        with pytest.raises(RequestError) as caught:
            engine.generate([1] * 20, SamplingParams(max_tokens=14))
        assert caught.value.status == 413


async def test_more_choices_than_the_queue_holds_are_refused_for_good(
    open_legible: OpenEngine,
) -> None:
    async with open_legible(waiting_max=4) as engine:
        with pytest.raises(RequestError) as caught:
            engine.generate("a", SamplingParams(n=5))
        assert (caught.value.status, caught.value.param) == (400, "n")


def test_bounds_that_are_integers_are_shown_as_integers() -> None:
    with pytest.raises(RequestError, match=r"max_tokens must be in \[1, 2147483647\], not 0"):
        check_params(SamplingParams(max_tokens=0), FACTS)
