"""Opening an engine: progress, cancellation midway, settings; and that closing gives all back."""

import gc
import json
import pathlib
import threading
import weakref
from typing import Any

import pytest
import tokenizers
import torch
import trio

from aserve.actors.engine import open_engine
from aserve.actors.loading import cores, name_of
from aserve.core.config import Config, Schedule
from aserve.core.request import SamplingParams
from aserve.errors import ConfigError, ModelError
from aserve.models.decoder import Model
from aserve.models.regions import kv_region
from aserve.runner.kv_store import KvStore
from aserve.runner.runner import Runner
from aserve.testing.tiny import write_tiny_model


class Made:
    """Those objects of a class that are made from now on, and are still there when asked."""

    def __init__(self, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self._all: list[weakref.ref[object]] = []
        init = kind.__init__  # type: ignore[misc]

        def noted(one: object, *given: Any, **named: Any) -> None:
            self._all.append(weakref.ref(one))
            init(one, *given, **named)

        monkeypatch.setattr(kind, "__init__", noted)

    @property
    def living(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self._all)


async def test_progress_is_told_while_loading(tiny_model_path: pathlib.Path) -> None:
    told: list[tuple[int, int, str]] = []
    async with open_engine(
        tiny_model_path, progress=lambda *step: told.append(step), compute__threads=1
    ):
        pass
    assert told
    assert all(0 <= done <= total for done, total, _ in told)
    assert told[-1][0] == told[-1][1]


async def test_cancelling_a_load_stops_it_midway(
    tiny_model_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, runners = Made(Model, monkeypatch), Made(Runner, monkeypatch)
    threads = threading.active_count()
    told: list[int] = []
    reached, go_on = threading.Event(), threading.Event()

    def progress(done: int, total: int, what: str) -> None:
        told.append(done)
        reached.set()
        go_on.wait(5)

    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:

            async def cancel_when_reached() -> None:
                while not reached.is_set():
                    await trio.lowlevel.checkpoint()
                scope.cancel()
                with trio.CancelScope(shield=True):
                    await trio.lowlevel.checkpoint()
                    await trio.lowlevel.checkpoint()
                go_on.set()

            nursery.start_soon(cancel_when_reached)
            async with open_engine(tiny_model_path, progress=progress, compute__threads=1):
                pytest.fail("it opened")
    assert scope.cancelled_caught
    assert len(told) == 1
    assert threading.active_count() <= threads + 1
    assert (models.living, runners.living) == (0, 0)


async def test_closing_frees_weights_and_pages(
    tiny_model_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores, runners = Made(KvStore, monkeypatch), Made(Runner, monkeypatch)
    async with open_engine(tiny_model_path, compute__threads=1) as engine:
        async for _ in engine.generate("a", SamplingParams(max_tokens=3)):
            pass
        assert (stores.living, runners.living) == (1, 1)
    # The engine itself may be held on to; what it held is gone.
    assert engine.model_name == "tiny"
    assert (stores.living, runners.living) == (0, 0)


async def test_errors_come_bare_and_all_at_once(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        async with open_engine(tmp_path / "nowhere"):
            pytest.fail("it opened")
    with pytest.raises(ConfigError) as caught:
        async with open_engine(tmp_path, cache__page_size=-1, layout__pp=0, no__such=1):
            pytest.fail("it opened")
    assert len(caught.value.findings) >= 3


async def test_overrides_beat_the_configuration(tiny_model_path: pathlib.Path) -> None:
    config = Config(schedule=Schedule(running_max=3, waiting_max=4))
    overrides = {"schedule.running_max": 5, "model__context_len": 64, "compute__threads": "1"}
    async with open_engine(tiny_model_path, config=config, **overrides) as engine:
        assert engine.config.schedule == Schedule(running_max=5, waiting_max=4)
        assert engine.context_len == 64
        assert engine.config.compute.threads == 1


async def test_a_context_beyond_the_models_is_refused(tiny_model_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="513"):
        async with open_engine(tiny_model_path, model__context_len=513, compute__threads=1):
            pytest.fail("it opened")


async def test_a_pool_too_small_for_anything_is_refused(tiny_model_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="pages"):
        async with open_engine(tiny_model_path, cache__kv_tokens=16, compute__threads=1):
            pytest.fail("it opened")


async def test_tokens_that_the_model_does_not_embed_are_a_clear_error(
    tmp_path: pathlib.Path,
) -> None:
    path = write_tiny_model(tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>", "<more>"])
    tokenizer.save(str(path / "tokenizer.json"))
    told: list[str] = []
    with pytest.raises(ModelError, match=r"ids up to 385.* only 384 tokens.*'<pad>'"):
        async with open_engine(path, progress=lambda *step: told.append(step[2])):
            pytest.fail("it opened")
    assert not told, "the weights were read first"


async def test_an_unknown_architecture_is_told_before_what_else_is_missing(
    tmp_path: pathlib.Path,
) -> None:
    path = write_tiny_model(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["Klingon"]}))
    with pytest.raises(ModelError, match=r"Klingon.*know LlamaForCausalLM"):
        async with open_engine(path):
            pytest.fail("it opened")


def test_a_pool_beyond_all_memory_is_refused() -> None:
    region = kv_region((0, 1), 1, 1, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"KV pool would take .* MiB.*cache\.kv_tokens"):
        KvStore((region,), 16, 2**54)  # more than any address space


def test_a_model_is_named_after_its_file_or_hub_name(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "Some-Model.Q4_1.gguf"
    file.touch()
    assert name_of(str(file)) == "Some-Model.Q4_1"
    assert name_of(str(tmp_path)) == tmp_path.name
    assert name_of("owner/name") == "owner/name"
    assert name_of("smollm2") == "smollm2"


def test_there_is_at_least_one_core() -> None:
    assert cores() >= 1


async def test_submitting_from_another_thread_is_refused(tiny_model_path: pathlib.Path) -> None:
    async with open_engine(tiny_model_path, compute__threads=1) as engine:
        caught: list[str] = []

        def submit() -> None:
            try:
                engine.generate("a")
            except RuntimeError as error:
                caught.append(str(error))

        thread = threading.Thread(target=submit)
        thread.start()
        thread.join()
        assert len(caught) == 1
        assert engine.statistics().planner.waiting == 0
