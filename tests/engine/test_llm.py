"""The plain-Python face: order, kinds of prompts, threads, notebooks, interrupts, closing."""

import asyncio
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import aserve
from aserve import LLM, RequestError, SamplingParams
from tests.braking import braked

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = ["The quick", "Once upon", "When in doubt, measure", "She"]


@pytest.fixture(scope="module")
def llm(tiny_model_path: pathlib.Path) -> Iterator[LLM]:
    with LLM(tiny_model_path, compute__threads=1, cache__kv_tokens=4096) as llm:
        yield llm


def test_outputs_stand_in_the_order_of_their_prompts(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    together = llm.generate(PROMPTS, GREEDY)
    assert [output.text for output in together] == alone
    assert len(set(alone)) == len(PROMPTS)
    backwards = llm.generate(PROMPTS[::-1], GREEDY)
    assert [output.text for output in backwards] == alone[::-1]


def test_text_ids_and_messages_are_prompts_alone_or_in_a_list(llm: LLM) -> None:
    ids = llm.tokenize("The quick")
    messages = [{"role": "user", "content": "Hi"}]
    assert llm.generate(ids, GREEDY) == llm.generate("The quick", GREEDY)
    several = llm.generate(["The quick", ids, messages], GREEDY)
    assert several[0].text == several[1].text
    assert several[2].text == llm.chat(messages, GREEDY)[0].text
    assert llm.detokenize(several[2].prompt_token_ids).startswith("<|im_start|>user\nHi<|im_end|>")
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(["The quick", "The quick"], [short, GREEDY])
    assert [len(output.token_ids) for output in outputs] == [2, 8]
    with pytest.raises(RequestError, match="2 prompts but 1 params"):
        llm.generate(["a", "b"], [GREEDY])


def test_an_output_tells_text_ids_logprobs_reason_and_usage(llm: LLM) -> None:
    wanted = SamplingParams(max_tokens=4, seed=1, logprobs=2, n=2, prompt_logprobs=0)
    [output] = llm.generate("The quick brown", wanted)
    assert output.usage.completion_tokens == sum(len(c.token_ids) for c in output.choices)
    assert output.finish_reason in ("length", "stop")
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) == output.usage.prompt_tokens
    assert output.prompt_logprobs[0] is None
    assert output.error is None
    assert llm.generate("The", GREEDY)[0].logprobs is None


def test_more_prompts_than_the_queue_holds_all_end(tiny_model_path: pathlib.Path) -> None:
    settings = {"schedule__waiting_max": 2, "schedule__running_max": 2, "compute__threads": 1}
    with LLM(tiny_model_path, **settings) as llm:
        outputs = llm.generate(["The quick"] * 20, GREEDY)
    assert len({output.text for output in outputs}) == 1


def test_a_refused_prompt_is_raised_and_the_rest_works_on(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["fine", "x" * 100_000], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert llm.generate("fine", GREEDY)[0].finish_reason


def test_an_option_that_is_none_is_refused_and_not_ignored(llm: LLM) -> None:
    options: Any = {"max_tokens": 3}
    with pytest.raises(RequestError, match="max_tokens is no option") as caught:
        llm.generate("The", **options)
    assert caught.value.param == "max_tokens"


def test_a_stream_joined_is_the_text_and_may_be_left_early(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    whole = llm.generate("The quick", long)[0].text
    assert "".join(delta.text for delta in llm.stream("The quick", long)) == whole
    aborted = llm.engine.statistics().finished.get("abort", 0)
    with braked(4):  # however late we leave, it is early
        stream = llm.stream("The quick", long)
        assert whole.startswith(next(stream).text)
        stream.close()
    llm.generate("The quick", GREEDY)
    assert llm.engine.statistics().finished["abort"] == aborted + 1


def test_a_progress_bar_shows_on_request(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    assert capfd.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY, progress=True)
    assert "4/4" in capfd.readouterr().err


def test_threads_share_it(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    found: dict[int, str] = {}

    def one(place: int) -> None:
        found[place] = llm.generate(PROMPTS[place], GREEDY)[0].text

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(len(PROMPTS))] == alone


def test_it_works_inside_a_running_asyncio_loop(llm: LLM) -> None:
    async def cell() -> str:
        return llm.generate("The quick", GREEDY)[0].text

    assert asyncio.run(cell()) == llm.generate("The quick", GREEDY)[0].text


def test_closing_leaves_no_thread(tiny_model_path: pathlib.Path) -> None:
    before = threading.active_count()
    llm = LLM(tiny_model_path, compute__threads=1)
    stream = llm.stream("The quick", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("The quick")
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: pathlib.Path) -> None:
    before = threading.active_count()
    with pytest.raises(aserve.ModelError, match="nowhere"):
        LLM(tmp_path / "nowhere")
    assert threading.active_count() == before


def test_several_wrong_settings_are_told_at_once(tiny_model_path: pathlib.Path) -> None:
    with pytest.raises(aserve.ConfigError) as caught:
        LLM(tiny_model_path, cache__page_size=0, schedule__stepp=1, layout__tp=2)
    assert len(caught.value.findings) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["", "llm.close()", "raise SystemExit(0)", "del llm"])
def test_a_program_that_forgets_to_close_ends(tiny_model_path: pathlib.Path, ending: str) -> None:
    program = (
        "import aserve\n"
        f"llm = aserve.LLM({str(tiny_model_path)!r}, compute__threads=1)\n"
        "stream = llm.stream('a', aserve.SamplingParams(max_tokens=400, ignore_eos=True))\n"
        "next(stream)\n"
        f"{ending}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, aserve; print('torch' in sys.modules, 'trio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
