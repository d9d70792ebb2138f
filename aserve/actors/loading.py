"""Opens what a rank needs (files, tokenizer, weights, KV pages), all of it off the event loop."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import trio

from aserve.actors.compute import ComputeThread
from aserve.actors.placement import Known, threads_each
from aserve.core.config import Cache, Config
from aserve.core.layout import Grid
from aserve.errors import ConfigError, ModelError
from aserve.models import fetch
from aserve.models.regions import Region, stored_as
from aserve.models.registry import Model, Types, check_layout, load_model, load_spec
from aserve.models.spec import ModelSpec
from aserve.runner.drafter import DraftModel
from aserve.runner.drafting import Target, check_drafts, open_draft_model
from aserve.runner.kv_store import MEMORY_SHARE, KvStore, memory_free_bytes, pages_for
from aserve.runner.runner import Runner
from aserve.runner.small_model import is_here
from aserve.tensor.collective import LayerPlane
from aserve.tensor.ops import open_ops
from aserve.tensor.sampler import Sampler, open_sampler
from aserve.text.tokenizer import Tokenizer, load_tokenizer

Progress = Callable[[int, int, str], None]


T = TypeVar("T")


class LoadCancelled(BaseException):
    """Unwinds a load that nobody waits for; never seen outside this module."""


async def load(
    compute: ComputeThread, work: Callable[[Progress], T], progress: Progress | None
) -> T:
    """`work(progress)` on the compute thread. Cancelling stops it at its next word of progress."""

    def step(done: int, total: int, what: str) -> None:
        if compute.cancelled:
            raise LoadCancelled
        if progress is not None:
            progress(done, total, what)

    try:
        loaded = await compute(work, step)
    except LoadCancelled:
        await trio.lowlevel.checkpoint_if_cancelled()
        raise
    await trio.lowlevel.checkpoint_if_cancelled()
    return loaded


def one_at_a_time(progress: Progress | None) -> Progress | None:
    """`progress` for threads that load side by side."""
    if progress is None:
        return None
    lock = threading.Lock()

    def step(done: int, total: int, what: str) -> None:
        with lock:
            progress(done, total, what)

    return step


def load_known(config: Config, progress: Progress) -> tuple[Known, str]:
    """All but the weights, and the path they are under. Raises ModelError, ConfigError."""
    path = fetch.resolve(config.model.path, progress)
    spec = load_spec(path)  # first: a model of an unknown kind may lack what follows
    tokenizer = load_tokenizer(path, config.model.chat_template)
    _check_vocab(tokenizer, spec.vocab)  # before the weights, which take long
    if findings := check_layout(spec, config.layout):
        raise ConfigError(findings)
    check_drafts(config.spec, spec, tokenizer, config.model.path, progress)
    known = Known(
        name=config.model.name or name_of(config.model.path),
        context_len=_context_len(config.model.context_len, spec.context_len),
        vocab_size=spec.vocab,
        tokenizer=tokenizer,
    )
    return known, os.path.abspath(path)


def check_model(config: Config) -> tuple[str, ...] | None:
    """What of `config` this model cannot do, without its weights; None if it is not on this
    machine."""
    try:
        if fetch.resolve_here(config.model.path) is None or not is_here(config.spec):
            return None
        load_known(config, lambda done, total, what: None)
    except ConfigError as error:
        return error.findings
    return ()


class Pools(NamedTuple):
    """The KV of a rank: `pages` is what it has room for, each of them in all regions."""

    regions: Sequence[Region]
    page_size: int
    pages: int


class RankModel:
    """One rank's share of the weights; any number of runners, one after another, may use it."""

    def __init__(
        self, model: Model, sampler: Sampler, pools: Pools, draft: DraftModel | None
    ) -> None:
        self.pages = pools.pages
        self.n_layers = model.spec.layers
        self.fingerprint = fingerprint(model.spec)
        self._model = model
        self._sampler = sampler
        self._pools = pools
        self._draft = draft

    def runner(self, tokenizer: Tokenizer, plane: LayerPlane, pages_total: int) -> Runner:
        """A runner with empty KV pools."""
        kv = KvStore(self._pools.regions, self._pools.page_size, pages_total)
        drafter = None
        if self._draft is not None:
            pages = pages_total + self._draft.pages_beside
            draft_kv = KvStore(self._draft.regions(), self._pools.page_size, pages)
            drafter = self._draft.drafter(draft_kv.layers)
        return Runner(self._model, kv, self._sampler, tokenizer, plane, drafter)


def fingerprint(spec: ModelSpec) -> str:
    """What must be equal on every rank, for people to compare."""
    return (
        f"{spec.arch}, {spec.layers} layers of {spec.hidden}, {spec.heads}/{spec.kv_heads} heads "
        f"of {spec.head_dim}, vocabulary {spec.vocab}, {str(spec.dtype).removeprefix('torch.')}"
    )


class Share(NamedTuple):
    """Which rank is loaded, and what it may have of its host: one of `n_local` ranks there."""

    rank: int
    n_local: int
    threads: int


def shares(config: Config, ranks: Sequence[int]) -> list[Share]:
    """Of the ranks of one host."""
    threads = threads_each(config.compute.threads or cores(), len(ranks))
    return [Share(rank, len(ranks), n) for rank, n in zip(ranks, threads, strict=True)]


def load_rank(
    config: Config, path: str, context_len: int, share: Share, progress: Progress
) -> RankModel:
    """The weights of one rank. Raises ModelError, ConfigError."""

    def step(done: int, total: int, what: str) -> None:
        progress(done, total, what if world == 1 else f"rank {share.rank}: {what}")

    world = Grid(config.layout).world
    ops = open_ops(config.compute.kernels, share.threads, config.compute.fused)
    types: Types = {"dtype": config.model.dtype, "weights": config.model.weights}
    model = load_model(
        path,
        ops=ops,
        progress=step,
        layout=config.layout,
        rank=share.rank,
        **types,
    )
    sampler = open_sampler(config.compute.kernels, getattr(ops, "team", None))
    tokens_max = config.schedule.running_max * (context_len + config.cache.page_size)
    cache = _fair_share(config.cache, share.n_local)
    regions = stored_as(model.regions(), cache.kv_dtype)
    target = Target(model, path, types, cache.page_size, config.schedule.running_max)
    draft = open_draft_model(config.spec, target, step)
    beside = () if draft is None else draft.regions()
    pages = pages_for((*regions, *beside), cache, tokens_max=tokens_max)
    return RankModel(model, sampler, Pools(regions, cache.page_size, pages), draft)


def _fair_share(cache: Cache, n_local: int) -> Cache:
    """The bound on the pool of one of `n_local` ranks of a host that see the same free memory."""
    if n_local == 1 or cache.kv_tokens is not None:
        return cache
    free_mib = int(memory_free_bytes() * MEMORY_SHARE) >> 20
    mib = min(cache.kv_mib_max, free_mib) // n_local
    return msgspec.structs.replace(cache, kv_mib_max=max(1, mib))


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
