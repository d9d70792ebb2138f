"""`aserve train-draft`: a draft head for a model, from conversations that it holds itself."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tqdm import tqdm

from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import say

if TYPE_CHECKING:
    from aserve.training.plan import Wish

LINE_S = 30.0  # between two lines where there is no terminal
METHODS = ("eagle", "eagle3")


def parser() -> CommandParser:
    made = CommandParser(
        "train-draft",
        "Make a draft head (EAGLE or EAGLE-3) for a model: let it hold conversations, train on "
        "them, measure, write a folder with config.json, model.safetensors and a model card. The "
        "same command goes on where it was interrupted.",
        usage="[MODEL] --method eagle|eagle3 --out DIR [flags]",
    )
    add = made.add_argument
    add("--method", required=True, metavar="|".join(METHODS), help="eagle3 foresees more")
    add("--out", required=True, metavar="DIR", help="where the head goes, and work on the way")
    add(
        "--data",
        metavar="FILE",
        help='JSON lines of {"messages": [...]} or {"prompt": text}, answered by the model where '
        "no answer is given (default: the model talks with itself)",
    )
    add_training_flags(made)
    add_model_flags(made)
    return made


def add_training_flags(made: CommandParser) -> None:
    group = made.add_argument_group("training")

    def number(flag: str, kind: type, default: float | None, what: str) -> None:
        metavar = "N" if kind is int else "X"
        shown = "" if default is None else " (default: %(default)s)"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=what + shown)

    number("--tokens", int, 1_500_000, "tokens of conversations")
    number("--streams", int, 48, "conversations held at once")
    number("--rounds", float, 3.0, "how often each is learnt from")
    number("--rate", float, 1e-3, "the highest learning rate")
    number("--batch-rows", int, 2048, "tokens in a step, padding included")
    number("--draft-vocab", int, 4096, "tokens that an EAGLE-3 head can draft, the most frequent")
    number("--inner", int, None, "width of the head's MLP (default: that of the model's)")
    number("--unrolled", int, 3, "steps of EAGLE-3's training-time test")
    group.add_argument(
        "--start",
        default="last-layer",
        metavar="last-layer|plain",
        help="what the head's layer begins as: the model's last one if it is alike, or random "
        "(default: %(default)s)",
    )
    number("--features-gib", float, 12.0, "disk for what the model makes of the conversations")
    number("--held-out", int, 60, "conversations of its own to measure by, beside 40 questions")
    number("--answer-len", int, 256, "tokens of an answer at most")
    number("--seed", int, 0, "of everything that is drawn")


class Bars:
    """A bar for each thing that is done; lines now and then where there is no terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[None] | None = None
        self._what, self._done = "", 0
        self._start_s = self._told_s = 0.0
        self._terminal = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str, note: str = "") -> None:
        if self._terminal:
            self._show(done, total, what, note)
        else:
            self._tell(done, total, what, note)

    def _show(self, done: int, total: int, what: str, note: str) -> None:
        if self._bar is None or what != self._what:
            self.close()
            self._what = what
            self._bar = tqdm(
                total=total or None,
                initial=done,
                desc=f"aserve: {what}",
                unit_scale=True,
                leave=False,
                file=sys.stderr,
            )
        self._bar.total = total or None
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def _tell(self, done: int, total: int, what: str, note: str) -> None:
        now_s = time.monotonic()
        if what != self._what:
            self._what, self._start_s, self._told_s, self._done = what, now_s, now_s, 0
            say(what)
        elif now_s - self._told_s > LINE_S or (done == total > self._done):
            self._told_s, self._done = now_s, done
            of = f" of {total}" if total else ""
            say(f"{what}: {done}{of} in {now_s - self._start_s:.0f} s  {note}".rstrip())

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Bars":
        return self

    def __exit__(self, *caught: object) -> None:
        self.close()


def run(given: Sequence[str]) -> int:
    arguments = parser().parse_args(given)
    config = config_of(arguments)
    # Imported late: it brings torch, which --help and refusals need not wait for.
    from aserve.training.making import make_head

    with Bars() as bars:
        made = make_head(wish_of(arguments), config, bars)
    for group, found in made.measured.items():
        told = ", ".join(f"{shape} {one.per_step:.2f}" for shape, one in found.items())
        say(f"tokens a step of the target, {group}: {told}")
    print(made.folder)
    return 0


def wish_of(arguments: argparse.Namespace) -> "Wish":
    from aserve.training.chatting import Manner
    from aserve.training.plan import Wish

    return Wish(
        method=arguments.method,
        out=arguments.out,
        data=arguments.data,
        tokens=arguments.tokens,
        streams=arguments.streams,
        rounds=arguments.rounds,
        rate=arguments.rate,
        batch_rows=arguments.batch_rows,
        draft_vocab=arguments.draft_vocab,
        inner=arguments.inner,
        start=arguments.start,
        unrolled=arguments.unrolled,
        seed=arguments.seed,
        features_gib=arguments.features_gib,
        own_held_out=arguments.held_out,
        manner=Manner(seed=arguments.seed, answer_len=arguments.answer_len),
    )
