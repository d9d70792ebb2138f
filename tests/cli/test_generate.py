"""`aserve generate` and `aserve chat` as a user runs them: a process, its two streams, its code."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from aserve.cli.answer import Answer
from aserve.cli.chat import cost
from aserve.core.request import Usage

pytestmark = pytest.mark.slow

SMALL = ("--cache.kv_mib_max", "16", "--compute.threads", "1")


def aserve(*given: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "aserve", *given],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def generate(model: pathlib.Path, *given: str, stdin: str = "") -> dict[str, object]:
    done = aserve("generate", str(model), "--json", *SMALL, *given, stdin=stdin)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def test_json_says_everything(tiny_model_path: pathlib.Path) -> None:
    answer = generate(tiny_model_path, "--prompt-ids", "5,6,7", "--max-tokens", "6", "--ignore-eos")
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage"}
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == 6  # type: ignore[arg-type]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "cached_tokens": 0,
        "target_steps": 6,
    }


def test_text_streams_to_stdout_and_is_that_of_the_json(tiny_model_path: pathlib.Path) -> None:
    given = ("--prompt", "Once upon", "--max-tokens", "12", "--temperature", "0.9", "--seed", "3")
    answer = generate(tiny_model_path, *given)
    done = aserve("generate", str(tiny_model_path), *SMALL, *given)
    assert done.returncode == 0
    text = str(answer["text"])
    assert done.stdout == (text if text.endswith("\n") else text + "\n")
    assert "Traceback" not in done.stderr


def test_stdin_is_the_prompt(tiny_model_path: pathlib.Path) -> None:
    asked = generate(tiny_model_path, "--chat", "Hello", "--max-tokens", "4")
    piped = generate(tiny_model_path, "--chat", "-", "--max-tokens", "4", stdin="Hello")
    assert asked == piped


def test_logprobs_come_with_alternatives(tiny_model_path: pathlib.Path) -> None:
    answer = generate(
        tiny_model_path, "--prompt", "a", "--max-tokens", "3", "--logprobs", "2", "--ignore-eos"
    )
    entries = answer["logprobs"]
    assert isinstance(entries, list)
    assert [entry["token_id"] for entry in entries] == answer["token_ids"]
    for entry in entries:
        # Greedy: the drawn token is the likeliest.
        assert entry["top"][0] == {"token_id": entry["token_id"], "logprob": entry["logprob"]}
        assert len(entry["top"]) == 2


def test_stop_text_ends_it(tiny_model_path: pathlib.Path) -> None:
    whole = generate(tiny_model_path, "--prompt", "The", "--max-tokens", "16", "--ignore-eos")
    text = str(whole["text"])
    stop = text[4:6]
    stopped = generate(tiny_model_path, "--prompt", "The", "--ignore-eos", "--stop", stop)
    assert stopped["text"] == text[: text.index(stop)]
    assert stopped["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens"),
        (("--prompt", "a", "--max-tokens", "100000"), "context"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt-ids", "99999"), "99999"),
        (("--prompt", ""), "prompt"),
    ],
)
def test_refusals_are_one_line_and_two(
    tiny_model_path: pathlib.Path, given: tuple[str, ...], said: str
) -> None:
    done = aserve("generate", str(tiny_model_path), *SMALL, *given)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = [line for line in done.stderr.splitlines() if "loading" not in line][-1:]
    assert line.startswith("aserve: ")
    assert said in line
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_refused() -> None:
    done = aserve("generate", "./no-such-model", "--prompt", "a")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_it_quietly(tiny_model_path: pathlib.Path) -> None:
    given = ("--prompt", "a", "--max-tokens", "500", "--ignore-eos")
    command = [sys.executable, "-m", "aserve", "generate", str(tiny_model_path), *SMALL, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)  # it has begun to answer
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def chat(model: pathlib.Path, lines: str, *given: str) -> "subprocess.CompletedProcess[str]":
    flags = ("--max-tokens", "5", "--temperature", "0", "--ignore-eos", "--json")
    return aserve("chat", str(model), *SMALL, *flags, *given, stdin=lines)


def test_a_conversation_remembers_and_reuses_its_prefix(tiny_model_path: pathlib.Path) -> None:
    done = chat(tiny_model_path, "Tell me of the dog and the fox on the hill.\nGo on.\n")
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert second["usage"]["cached_tokens"] >= 16


def test_reset_forgets(tiny_model_path: pathlib.Path) -> None:
    done = chat(tiny_model_path, "Hello\n/reset\nHello\n/exit\nnever asked\n")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["text"] == second["text"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


def test_system_instructions_stand_first(tiny_model_path: pathlib.Path) -> None:
    plain = chat(tiny_model_path, "Hello\n")
    told = chat(tiny_model_path, "Hello\n", "--system", "Be brief.")
    lengths = [json.loads(d.stdout)["usage"]["prompt_tokens"] for d in (plain, told)]
    assert lengths[0] < lengths[1]


def test_a_conversation_longer_than_the_context_drops_its_oldest_turn(
    tiny_model_path: pathlib.Path,
) -> None:
    line = "When in doubt, measure; and then write down the number. " * 2
    done = chat(tiny_model_path, f"{line}\n" * 8, "--model.context_len", "256")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 8
    assert "oldest turn was dropped" in done.stderr


def test_a_message_longer_than_the_context_is_refused_and_the_next_answered(
    tiny_model_path: pathlib.Path,
) -> None:
    done = chat(tiny_model_path, "word " * 600 + "\nHello\n")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    assert "context" in done.stderr


def test_smollm2_knows_where_paris_is(smollm2_path: pathlib.Path) -> None:
    answer = generate(smollm2_path, "--prompt", "The capital of France is", "--max-tokens", "8")
    assert "Paris" in str(answer["text"])


def test_the_cost_of_an_answer_tells_of_steps_that_drafts_saved() -> None:
    answer = Answer()
    answer.token_ids = [1, 2, 3]
    answer.finish_reason = "stop"
    for steps, told in ((3, "ended by stop"), (2, "ended by stop, in 2 steps")):
        answer.usage = Usage(5, 3, 0, steps)
        assert cost(answer).endswith(told)
