"""Bodies that are large and legal: read where they hold up nobody's stream, or refused by size."""

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio

from aserve.actors.prompt import PromptReader
from aserve.actors.validate import Facts
from aserve.api.completions import prompts_of
from aserve.core.config import Limits
from aserve.errors import RequestError
from aserve.text.tokenizer import Tokenizer
from tests.api.serving import Running

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = {"role": "user", "content": "hi"}


class Unwalkable(Sequence[int]):
    """Two million ids, which nobody may go through."""

    def __len__(self) -> int:
        return 2_000_001

    def __getitem__(self, place: Any) -> Any:
        assert place == 0
        return 5

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("walked")


def test_ids_beyond_the_context_are_refused_by_their_length(server: Running) -> None:
    with pytest.raises(RequestError, match="maximum context length is 512"):
        prompts_of(Unwalkable(), 256, 512)
    tokenizer: Tokenizer = server.server.service.engine.tokenizer
    reader = PromptReader(tokenizer, Facts(512, tokenizer.vocab_size, Limits()))
    with pytest.raises(RequestError, match="maximum context length is 512"):
        reader.tokens(Unwalkable())


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_more_messages_than_may_be_are_refused(server: Running, path: str) -> None:
    with server.client() as client:
        response = client.post(path, json={"messages": [HELLO] * 4097})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    assert "4096" in response.json()["error"]["message"]


def threads_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> set[str]:
    """Names of the threads that call `owner.name` from now on."""
    seen: set[str] = set()
    original = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        seen.add(threading.current_thread().name)
        return original(*given, **named)

    monkeypatch.setattr(owner, name, call)
    return seen


def test_much_text_is_read_in_other_threads(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = server.call(lambda: threading.current_thread().name)
    encoding = threads_of(monkeypatch, server.server.service.prompts._reader, "encode")
    plain = threads_of(monkeypatch, _prompts(), "plain_messages")
    with server.client() as client:
        # Each prompt is short; all of them are not.
        body: dict[str, Any] = {"prompt": ["word " * 20] * 64, "max_tokens": 1}
        assert client.post(COMPLETE, json=body).status_code == 200
        parts = [{"type": "text", "text": ""}] * 3000
        body = {"messages": [{"role": "user", "content": parts}, HELLO], "max_tokens": 1}
        assert len(json.dumps(body)) > 1 << 16
        assert client.post(CHAT, json=body).status_code == 200
    assert encoding
    assert plain
    assert loop not in encoding | plain


def _prompts() -> Any:
    from aserve.api import prompts

    return prompts


class Steps(trio.abc.Instrument):
    """Counts the turns of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


def test_other_tasks_have_their_turn_between_prompts(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps, at = server.server.service.engine, Steps(), []
    submit = engine.submit

    def noted(*given: Any, **named: Any) -> Any:
        at.append(steps.count)
        return submit(*given, **named)

    monkeypatch.setattr(engine, "submit", noted)
    server.call(lambda: trio.lowlevel.add_instrument(steps))
    try:
        with server.client() as client:
            body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
            assert client.post(COMPLETE, json=body).status_code == 200
    finally:
        server.call(lambda: trio.lowlevel.remove_instrument(steps))
    assert len(set(at)) == 3, at


def test_bad_words_are_made_tokens_once_for_all_choices(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aserve.actors import sampling

    calls: list[int] = []
    original = sampling._bad_words

    def counted(*given: Any) -> Any:
        calls.append(1)
        return original(*given)

    monkeypatch.setattr(sampling, "_bad_words", counted)
    with server.client() as client:
        body = {"prompt": "a", "n": 4, "max_tokens": 1, "bad_words": ["x"], "seed": 3}
        assert client.post(COMPLETE, json=body).status_code == 200
    assert len(calls) == 1
