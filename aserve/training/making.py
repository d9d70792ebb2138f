"""A draft head from a model's name: collect conversations, train, measure, write. Each stage goes
on from what an earlier run left in the folder."""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec
import torch
import trio
from torch import Tensor

from aserve.actors.engine import open_engine
from aserve.actors.loading import cores
from aserve.core.config import Config
from aserve.errors import ConfigError
from aserve.models import fetch
from aserve.models.eagle_loading import load_head, shared_with
from aserve.models.registry import Model, load_model, open_checkpoint
from aserve.models.weights.loader import HEAD, TABLE
from aserve.tensor.ops import open_ops
from aserve.text.tokenizer import load_tokenizer
from aserve.training import card
from aserve.training.acceptance import Measured, measure_all
from aserve.training.chatting import Author, Template
from aserve.training.collecting import Collector, Goal, collected
from aserve.training.dataset import Dataset, Features, Order, batch_of, frequent_tokens
from aserve.training.files import Conversation, load_conversations, write_whole
from aserve.training.network import Network
from aserve.training.objective import Batch
from aserve.training.objective import Goal as Objective
from aserve.training.plan import Folder, Given, Wish, check, given_by
from aserve.training.prompts import HELD_OUT
from aserve.training.start import Ends, first_weights, last_layer
from aserve.training.target import Seen, Target
from aserve.training.trainer import Progress, Schedule, Trainer, chain_of

LIVE_S = 45.0  # between two looks at the held-out conversations
LIVE_TEXTS = 24
Held = tuple[Conversation, Seen]


class Watch(Protocol):
    """Told how far it is; `note` says what else is known."""

    def __call__(self, done: int, total: int, what: str, note: str = "", /) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    folder: pathlib.Path
    measured: Mapping[str, Mapping[str, Measured]]


def make_head(wish: Wish, config: Config, watch: Watch) -> Made:
    """Blocks until the head is in `wish.out`. Raises ConfigError, ModelError, RequestError."""
    check(wish)
    given = given_by(wish)
    folder = Folder(wish.out)
    path = fetch.resolve(config.model.path, watch)
    tokenizer = load_tokenizer(path, config.model.chat_template)
    Template(tokenizer)
    folder.claim(wish, config.model)
    files = _conversations(wish, config, given, folder, watch)
    held_out = [one for file in files[1] for one in load_conversations(file)]
    with _threads(config.compute.threads or cores()) as threads:
        workshop = Workshop(wish, config, path, threads, watch)
        return workshop.make(folder, files[0], held_out, given)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


def _conversations(
    wish: Wish, config: Config, given: Given, folder: Folder, watch: Watch
) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Token files (to train on, to measure by), by an engine if not all are there."""
    measured_by = Goal(1 << 62, given.n_held_out, wish.streams, per_file=given.n_held_out)
    goal = Goal(wish.tokens, given.n_trained, wish.streams)
    trained, held_out = collected(folder.tokens, goal), collected(folder.held_out, measured_by)
    if trained is not None and held_out is not None:
        return trained, held_out
    schedule = msgspec.structs.replace(
        config.schedule,
        running_max=wish.streams,
        waiting_max=max(config.schedule.waiting_max, wish.streams),
    )
    engine_config = msgspec.structs.replace(config, schedule=schedule)

    async def collect() -> tuple[list[pathlib.Path], list[pathlib.Path]]:
        async with open_engine(config=engine_config, progress=watch) as engine:

            def told(tokens: int) -> None:
                total = 0 if given.trained is not None else wish.tokens
                watch(min(tokens, total or tokens), total, "collecting tokens of conversations")

            measuring = Author(engine, wish.manner, given.held_out)
            out = await Collector(
                folder.held_out, measured_by, measuring.held_out, lambda tokens: None
            ).run()
            training = Author(engine, wish.manner, given.trained)
            return await Collector(folder.tokens, goal, training.trained, told).run(), out

    return trio.run(collect)


class Workshop:
    """Holds the target, and what is made of it."""

    def __init__(
        self, wish: Wish, config: Config, path: pathlib.Path, threads: int, watch: Watch
    ) -> None:
        self.wish, self.config, self.watch = wish, config, watch
        self.ops = open_ops(config.compute.kernels, threads, fused=False)
        self.model: Model = load_model(
            path,
            ops=self.ops,
            progress=watch,
            dtype=config.model.dtype,
            weights=config.model.weights,
        )
        self.spec = self.model.spec
        with open_checkpoint(path) as (_, source):
            shape = (slice(0, self.spec.vocab), slice(0, self.spec.hidden))
            self.table = source.read(TABLE, shape, torch.bfloat16).clone()
            self.head = self.table
            if not self.spec.tied:
                self.head = source.read(HEAD, shape, torch.bfloat16).clone()
            self.last = last_layer(source, self.spec) if wish.start == "last-layer" else None

    def make(
        self,
        folder: Folder,
        files: list[pathlib.Path],
        held_out: list[Conversation],
        given: Given,
    ) -> Made:
        wish, is_eagle = self.wish, self.wish.method == "eagle"
        ids_D = None
        if not is_eagle:
            ids_D = frequent_tokens(files, wish.draft_vocab, self.spec.eos_ids)
            if not len(ids_D):
                raise ConfigError("no conversation has an answer: there is nothing to learn from")
        n_drafted = self.spec.vocab if ids_D is None else len(ids_D)
        inner = wish.inner or self.spec.inner
        config = card.head_config(self.spec, wish.method, n_drafted, inner)
        spec = card.spec_for(config, self.spec, wish.method)
        target = Target(self.model, spec.captured)
        usable_V = torch.ones(self.spec.vocab, dtype=torch.bool)
        if ids_D is not None:
            usable_V = torch.zeros_like(usable_V).index_fill(0, ids_D, True)
        features = Features(
            folder.features(wish.method), target, int(wish.features_gib * (1 << 30))
        )
        order = Order(wish.seed, wish.batch_rows, wish.manner.tokens_max)
        data = Dataset(files, features, order, usable_V)
        head_VH = self.head if ids_D is None else self.head[ids_D].clone()
        network = Network(spec, self.table)
        goal = Objective(network, head_VH, 1 if is_eagle else wish.unrolled)
        generator = torch.Generator().manual_seed(wish.seed)
        weights = first_weights(spec, Ends(self.model.norm, head_VH, self.last), generator)
        schedule = Schedule(wish.rounds, wish.rate, wish.seed)
        trainer = Trainer(goal, weights, data, schedule, folder.checkpoint)
        self.watch(0, 0, "reading the held-out conversations")
        texts = _seen(target, held_out)
        batches = [batch_of([text], usable_V) for text in texts[:: -(-len(texts) // LIVE_TEXTS)]]
        trainer.run(_Live(self.watch, trainer, Sight(batches, ids_D, folder.log)))
        size = card.save_head(folder.path, config, trainer.weights, ids_D)
        return self._measured(folder, texts, given, (size, trainer))

    def _measured(
        self, folder: Folder, texts: list[Held], given: Given, made: tuple[int, Trainer]
    ) -> Made:
        size, trainer = made
        self.watch(0, 0, "measuring on the held-out conversations")
        head = load_head(folder.path, shared_with(self.model), self.ops)
        measured = {name: measure_all(head, some) for name, some in groups_of(texts, given).items()}
        facts = card.Facts(
            target=self.config.model.name or os.path.basename(self.config.model.path.rstrip("/")),
            method=self.wish.method,
            command=command_of(self.wish, self.config),
            data=data_told(self.wish, trainer.data, given),
            training=training_told(self.wish, trainer),
            size_bytes=size,
            measured=measured,
        )
        write_whole(folder.path / "README.md", card.card(facts).encode())
        return Made(folder.path, measured)


def measure_head(
    head: str | os.PathLike[str], model: Model, conversations: list[Conversation]
) -> dict[str, Measured]:
    """Of a head in a folder, whoever trained it, each shape of tree, on the last answers of
    conversations that `model` answered greedily."""
    loaded = load_head(head, shared_with(model), model.ops)
    return measure_all(loaded, _seen(Target(model, loaded.spec.captured), conversations))


def groups_of(texts: list[Held], given: Given) -> dict[str, list[Held]]:
    if given.held_out is not None:
        return {"lines of the file": texts}
    questions = len(HELD_OUT)
    found = {"questions": texts[:questions], "self-prompted": texts[questions:]}
    return {name: some for name, some in found.items() if some}


def _seen(target: Target, conversations: list[Conversation]) -> list[Held]:
    seen = target.read([one.tokens.tolist() for one in conversations])
    cuts = [len(one) for one in conversations]
    parts = zip(
        seen.features_TF.split(cuts),
        seen.hidden_TH.split(cuts),
        seen.best_T.split(cuts),
        strict=True,
    )
    return [(one, Seen(*part)) for one, part in zip(conversations, parts, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """Held-out conversations to look at while training; a line of what was seen goes to `log`."""

    batches: list[Batch]
    ids_D: Tensor | None
    log: pathlib.Path


class _Live:
    """Shows each step, and now and then what a chain of 3 would accept by now."""

    def __init__(self, watch: Watch, trainer: Trainer, sight: Sight) -> None:
        self._watch, self._trainer, self._sight = watch, trainer, sight
        self._told_s = time.monotonic()
        self._chain = ""

    def __call__(self, now: Progress) -> None:
        is_last = now.step == now.steps
        if is_last or time.monotonic() - self._told_s > LIVE_S:
            trainer = self._trainer
            with torch.autocast("cpu", torch.bfloat16, enabled=trainer.schedule.is_half):
                sight = self._sight
                chain = chain_of(trainer.goal, trainer.weights, sight.batches, sight.ids_D)
            self._told_s = time.monotonic()
            self._chain = f", {chain:.2f} tokens a step with a chain of 3"
            row = {"step": now.step, "steps": now.steps, "loss": now.loss, "chain_of_3": chain}
            with self._sight.log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self._watch(now.step, now.steps, "training", f"loss {now.loss:.3f}{self._chain}")


def command_of(wish: Wish, config: Config) -> str:
    parts = ["aserve train-draft", config.model.path, f"--method {wish.method}"]
    plain = Wish(method=wish.method, out=wish.out)
    for name in (
        "data",
        "tokens",
        "rounds",
        "rate",
        "batch_rows",
        "draft_vocab",
        "inner",
        "start",
        "seed",
    ):
        value = getattr(wish, name)
        if value != getattr(plain, name):
            parts.append(f"--{name.replace('_', '-')} {value}")
    if config.model.weights != "keep":
        parts.append(f"--weights {config.model.weights}")
    return " ".join([*parts, "--out DIR"])


def data_told(wish: Wish, data: Dataset, given: Given) -> str:
    kind = (
        f"the conversations of a file ({pathlib.Path(wish.data).name})"
        if wish.data is not None
        else "conversations of the target with itself, half of them on questions from templates"
    )
    return (
        f"{data.n_conversations} conversations, {data.n_tokens} tokens: {kind}; all answers but "
        f"given ones are the target's. {given.n_held_out} more were held out."
    )


def training_told(wish: Wish, trainer: Trainer) -> str:
    steps = f"{trainer.step} steps, {wish.rounds:g} rounds, {trainer.tokens} tokens read in all"
    if wish.method == "eagle":
        return f"{steps}; smooth L1 of features and 0.1 x soft cross-entropy."
    return (
        f"{steps}; training-time test of {wish.unrolled} steps, soft cross-entropy over "
        f"{trainer.goal.head_VH.shape[0]} tokens."
    )
