"""`aserve serve` as a user starts it, reaches it, measures it and ends it."""

import contextlib
import gc
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import openai
import pytest

from aserve import cli

pytestmark = pytest.mark.slow

SMALL = ("--cache.kv_mib_max", "16", "--compute.threads", "1", "--port", "0")


@contextlib.contextmanager
def serving(*given: str) -> Iterator[tuple[str, str, "subprocess.Popen[str]"]]:
    """The URL, the ready line and the process."""
    command = [sys.executable, "-W", "error", "-m", "aserve", "serve", *given, *SMALL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"serving \S+ at (http://127\.0\.0\.1:\d+) ", line):
                    yield found[1], line, process
                    return
            pytest.fail("the server ended before it was ready")
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def url(tiny_model_path: pathlib.Path) -> Iterator[str]:
    with serving(str(tiny_model_path)) as (found, _, _):
        yield found


def test_the_ready_line_names_model_url_and_time(tiny_model_path: pathlib.Path) -> None:
    with serving(str(tiny_model_path), "--model.name", "parrot") as (_, line, process):
        pattern = r"aserve: serving parrot at http://127\.0\.0\.1:\d+ \(ready in \d+\.\d s\)\n"
        assert re.fullmatch(pattern, line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_openai_client_is_answered(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    with client:
        [model] = client.models.list().data
        answer = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=5
        )
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 5


def test_the_load_generator_gets_every_token(url: str) -> None:
    flags = ("--requests", "12", "--concurrency", "4", "--warmup", "1", "--output-len", "6")
    command = [sys.executable, "-m", "aserve", "bench", "serve", "--url", url, *flags]
    for more in (
        ("--prompts", "ids", "--vocab", "300", "--prompt-len", "8:20"),
        ("--prompt-len", "24", "--endpoint", "chat", "--shared-prefix", "0.9"),
        ("--rate", "100", "--prompt-len", "128"),
    ):
        done = subprocess.run(
            [*command, "--ignore-eos", "--json", *more], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        summary = json.loads(done.stdout)
        assert summary["failures"] == 0
        assert summary["completion_tokens"] == 72
        assert summary["ttft_ms"]["p50"] > 0
    assert summary["prompt_tokens"] == pytest.approx(12 * 128, rel=0.2)


def test_an_api_key_is_asked_for(tiny_model_path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[server]\napi_key = "from the file"\n')
    given = (str(tiny_model_path), "--config", str(path), "--api-key", "from the flag")
    with serving(*given) as (url, _, _):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/v1/models")
        assert caught.value.code == 401
        caught.value.close()
        asked = urllib.request.Request(f"{url}/v1/models")
        asked.add_header("Authorization", "Bearer from the flag")
        with urllib.request.urlopen(asked) as answer:
            assert answer.status == 200


def test_a_port_that_is_taken_is_one_clear_line(tiny_model_path: pathlib.Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "aserve", "serve", str(tiny_model_path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode in (1, 2)
    assert port in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_drains_and_ends(tiny_model_path: pathlib.Path) -> None:
    with serving(str(tiny_model_path)) as (_, _, process):
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        said = process.stderr.read()
        assert process.wait(30) in (0, 130)
    assert "Traceback" not in said


AT_IMPORT = """
import os, signal, sys
where, sys.argv[1:] = sys.argv[-1], ["serve", "nowhere"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), {number})
sys.meta_path.insert(0, Finder())
from aserve.cli import entry
entry()
"""
WHILE_LOADING = """
import os, sys, trio
import aserve.actors.here
from aserve.cli import entry
async def load(*given):
    os.kill(os.getpid(), {number})
    await trio.sleep_forever()
aserve.actors.here.load = load
sys.argv[1:] = ["serve", "--port", "0", "--server.log_level", "error"]
entry()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["aserve.cli.serve", "torch", "loading"])
def test_a_signal_before_it_is_ready_ends_with_a_line(place: str, number: signal.Signals) -> None:
    script = (WHILE_LOADING if place == "loading" else AT_IMPORT).format(number=int(number))
    command = [sys.executable, "-W", "error", "-c", script, place]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == f"aserve: ended by {number.name}\n"
    assert done.returncode == 128 + number


def test_what_is_loaded_is_left_out_of_later_searches_for_garbage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from aserve.api import server

    frozen: list[int] = []

    async def serve(config: object, *, ready: Callable[[str], None], progress: object) -> None:
        ready("http://x")
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(server, "serve", serve)
    before = gc.get_freeze_count()
    try:
        assert cli.main(["serve", "./somewhere"]) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > before + 1000
    assert "serving ./somewhere at http://x" in capsys.readouterr().err
