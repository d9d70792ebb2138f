"""Opens what a rank needs (files, tokenizer, weights, KV pages), all of it off the event loop."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import trio

from aserve.actors.compute import ComputeThread
from aserve.actors.rank import RankRunner
from aserve.core.config import Config
from aserve.core.planner import CacheSpec
from aserve.errors import ConfigError, ModelError
from aserve.models import fetch
from aserve.models.registry import load_model, load_spec
from aserve.runner.kv_store import KvStore, pages_for
from aserve.runner.runner import Runner
from aserve.tensor.ops import open_ops
from aserve.tensor.sampler import open_sampler
from aserve.text.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[int, int, str], None]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in memory, and what its users need to know of it."""

    name: str
    context_len: int
    vocab_size: int
    tokenizer: Tokenizer
    cache: CacheSpec
    runner: RankRunner[Any, Any]


class LoadCancelled(BaseException):
    """Unwinds a load that nobody waits for; never seen outside this module."""


async def load(config: Config, compute: ComputeThread, progress: Progress | None) -> Loaded:
    """Load on the compute thread. Raises ModelError, ConfigError; cancelling stops it midway."""

    def step(done: int, total: int, what: str) -> None:
        if compute.cancelled:
            raise LoadCancelled
        if progress is not None:
            progress(done, total, what)

    try:
        loaded = await compute(_load, config, step)
    except LoadCancelled:
        await trio.lowlevel.checkpoint_if_cancelled()
        raise
    await trio.lowlevel.checkpoint_if_cancelled()
    return loaded


def _load(config: Config, progress: Progress) -> Loaded:
    path = fetch.resolve(config.model.path, progress)
    spec = load_spec(path)  # first: a model of an unknown kind may lack what follows
    tokenizer = load_tokenizer(path, config.model.chat_template)
    _check_vocab(tokenizer, spec.vocab)  # before the weights, which take long
    ops = open_ops(config.compute.kernels, config.compute.threads or cores())
    model = load_model(path, dtype=config.model.dtype, ops=ops, progress=progress)
    context_len = _context_len(config.model.context_len, model.spec.context_len)
    cache = config.cache
    tokens_max = config.schedule.running_max * (context_len + cache.page_size)
    pages_total = pages_for(model.regions(), cache, tokens_max=tokens_max)
    kv = KvStore(model.regions(), cache.page_size, pages_total)
    sampler = open_sampler(config.compute.kernels, getattr(ops, "team", None))
    return Loaded(
        name=config.model.name or name_of(config.model.path),
        context_len=context_len,
        vocab_size=model.spec.vocab,
        tokenizer=tokenizer,
        cache=CacheSpec(cache.page_size, pages_total),
        runner=Runner(model, kv, sampler, tokenizer),
    )


def _check_vocab(tokenizer: Tokenizer, vocab: int) -> None:
    """A model may have more rows than the tokenizer has tokens, but a token needs its row."""
    if tokenizer.vocab_size > vocab:
        first = tokenizer.hf.id_to_token(vocab)
        raise ModelError(
            f"the tokenizer has token ids up to {tokenizer.vocab_size - 1}, the model embeds only "
            f"{vocab} tokens: take {first!r} and what follows out of the tokenizer, or resize the "
            "model's embedding to it"
        )


def _context_len(asked: int | None, trained: int) -> int:
    if asked is None:
        return trained
    if not 1 <= asked <= trained:
        raise ConfigError(f"model.context_len is {asked}; the model was made for 1 to {trained}")
    return asked


def name_of(path: str) -> str:
    """What clients call the model: `dir/SmolLM2.gguf` is SmolLM2, a hub name keeps its owner."""
    if os.path.exists(path):
        return os.path.basename(os.path.abspath(path)).removesuffix(".gguf")
    return path


def cores() -> int:
    """The cores this process may use: its affinity, within its control group's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
