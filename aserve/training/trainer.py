"""Fits a head to a dataset: AdamW over warm-up and cosine, checkpoints it can go on from.

A step is a function of the weights before it, the seed and its number, so a run that was
interrupted ends with the bits of one that was not.
"""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import safetensors
import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.training.adam import Adam
from aserve.training.dataset import Dataset, Place
from aserve.training.files import save_tensors
from aserve.training.network import Weights
from aserve.training.objective import Batch, Goal, chain_hits, loss

WARM_UP_SHARE, WARM_UP_MAX = 0.05, 200
LAST_RATE = 0.02  # of the learning rate, at the end
CHAIN = 3
SAVED_EACH_S = 120.0  # at least


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """`rounds` through the data at a learning rate of up to `rate`. `is_half`: products in
    bfloat16. A checkpoint every `save_steps`, and when the last one is old."""

    rounds: float
    rate: float
    seed: int
    is_half: bool = True
    save_steps: int = 200

    def rate_at(self, step: int, steps: int) -> float:
        warm = max(1, min(WARM_UP_MAX, int(steps * WARM_UP_SHARE)))
        if step < warm:
            return self.rate * (step + 1) / warm
        turn = (step - warm) / max(1, steps - warm)
        return self.rate * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * turn)))


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """After a step. `loss` is a running mean."""

    step: int
    steps: int
    loss: float
    tokens: int


Told = Callable[[Progress], object]


class Trainer:
    def __init__(
        self, goal: Goal, weights: Weights, data: Dataset, schedule: Schedule, path: pathlib.Path
    ) -> None:
        """`path` is that of the checkpoint. Goes on from it if it is there.

        Raises ConfigError if it is of other data or another schedule, or damaged.
        """
        self.goal, self.data, self.schedule, self.path = goal, data, schedule, path
        self.weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
        self._adam = Adam(self.weights)
        per_round = len(data.batches(0))
        self.steps = max(1, round(per_round * schedule.rounds))
        self.step, self.loss, self.tokens = 0, 0.0, 0
        self._saved_s = time.monotonic()
        if path.is_file():
            self._resume()

    def run(self, told: Told) -> None:
        for places in self._batches():
            batch = self.data.load(places)
            value = self._one(batch)
            self.step += 1
            self.tokens += batch.n_tokens
            self.loss = value if self.step == 1 else 0.97 * self.loss + 0.03 * value
            is_due = time.monotonic() - self._saved_s > SAVED_EACH_S
            if is_due or self.step % self.schedule.save_steps == 0 or self.step == self.steps:
                self.save()
            told(Progress(self.step, self.steps, self.loss, self.tokens))

    def _batches(self) -> Iterator[list[Place]]:
        """From the step that is next."""
        passed, round_ = 0, 0
        while passed < self.steps:
            for places in self.data.batches(round_):
                if passed >= self.steps:
                    return
                if passed >= self.step:
                    yield places
                passed += 1
            round_ += 1

    def _one(self, batch: Batch) -> float:
        generator = torch.Generator().manual_seed(self.schedule.seed * 1_000_003 + self.step)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.schedule.is_half):
            value = loss(self.goal, self.weights, batch, generator)
        value.backward()
        self._adam.step(self.schedule.rate_at(self.step, self.steps), self.step + 1)
        return float(value.detach())

    def _plan(self) -> str:
        """What a checkpoint must agree in."""
        facts = dataclasses.asdict(self.schedule) | {
            "save_steps": None,
            "steps": self.steps,
            "tokens": self.data.n_tokens,
            "unrolled": self.goal.steps,
            "shapes": {name: list(w.shape) for name, w in self.weights.items()},
        }
        return json.dumps(facts, sort_keys=True)

    def save(self) -> None:
        tensors: dict[str, Tensor] = {}
        for name, w in self.weights.items():
            tensors[f"weight/{name}"] = w.detach()
            tensors[f"mean/{name}"] = self._adam.means[name]
            tensors[f"square/{name}"] = self._adam.squares[name]
        now = {"step": self.step, "loss": self.loss, "tokens": self.tokens}
        self._saved_s = time.monotonic()
        save_tensors(self.path, tensors, {"plan": self._plan(), "now": json.dumps(now)})

    def _resume(self) -> None:
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                notes: Mapping[str, str] = file.metadata() or {}
                self._check(notes)
                for name, w in self.weights.items():
                    w.data.copy_(file.get_tensor(f"weight/{name}"))
                    self._adam.means[name].copy_(file.get_tensor(f"mean/{name}"))
                    self._adam.squares[name].copy_(file.get_tensor(f"square/{name}"))
            now: dict[str, Any] = json.loads(notes["now"])
        except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self.path} is damaged ({error}); remove it to train anew"
            ) from error
        self.step, self.loss, self.tokens = now["step"], now["loss"], now["tokens"]

    def _check(self, notes: Mapping[str, str]) -> None:
        theirs, ours = json.loads(notes["plan"]), json.loads(self._plan())
        differ = [key for key in ours if theirs.get(key) != ours[key]]
        if differ:
            found = "; ".join(
                "other shapes" if key == "shapes" else f"{key} {theirs.get(key)}, now {ours[key]}"
                for key in differ
            )
            raise ConfigError(
                f"{self.path} is of another training ({found}); remove it to train anew, or take "
                "the settings it began with"
            )


def chain_of(goal: Goal, weights: Weights, batches: Sequence[Batch], ids_D: Tensor | None) -> float:
    """Tokens per step of the target with a chain of 3 over the answers of these batches: what
    `acceptance.measure` says of such a head, with the weights that are being trained."""
    tokens = steps = 0
    chain = dataclasses.replace(goal, steps=CHAIN)
    for batch in batches:
        hits = chain_hits(chain, weights, batch, ids_D)
        for row, wanted in enumerate(batch.wanted_BL.tolist()):
            start, end = _last_answer(wanted)
            known = start + 1  # the first token comes with the prompt
            while known < end:
                accepted = 0
                while accepted < CHAIN and known + accepted < end:
                    if not hits[accepted, row, known + accepted]:
                        break
                    accepted += 1
                gained = min(accepted + 1, end - known)
                tokens, steps, known = tokens + gained, steps + 1, known + gained
    return tokens / max(1, steps)


def _last_answer(wanted: Sequence[float]) -> tuple[int, int]:
    end = len(wanted)
    while end > 0 and wanted[end - 1] != 1:
        end -= 1
    start = end
    while start > 0 and wanted[start - 1] == 1:
        start -= 1
    return start, end
