"""What a training is asked to be, where it keeps what, and that a folder holds only one."""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence

from aserve.core.config import Model
from aserve.errors import ConfigError
from aserve.models.eagle_spec import Method
from aserve.training.chatting import Manner, Messages
from aserve.training.files import read_questions, write_whole
from aserve.training.prompts import HELD_OUT
from aserve.training.start import STARTS, Start

METHODS: tuple[Method, ...] = ("eagle", "eagle3")
HELD_OUT_SHARE, HELD_OUT_MAX = 20, 64  # one in so many lines of a file, at most so many
OWN_HELD_OUT = 60  # conversations that the target begins itself


DEFAULT_MANNER = Manner()


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """`tokens` of conversations, by `streams` at once; `rounds` of training over them.

    `draft_vocab` and `inner` (the head's MLP; None: as wide as the target's) make the size of the
    head. `unrolled` steps of training-time test for EAGLE-3. `features_gib` of disk at most.
    """

    method: Method
    out: str
    data: str | None = None
    tokens: int = 1_500_000
    streams: int = 48
    rounds: float = 3.0
    rate: float = 1e-3
    batch_rows: int = 2048
    draft_vocab: int = 4096
    inner: int | None = None
    start: Start = "last-layer"
    unrolled: int = 3
    seed: int = 0
    features_gib: float = 12.0
    own_held_out: int = OWN_HELD_OUT
    manner: Manner = DEFAULT_MANNER


def check(wish: Wish) -> None:
    """Raises ConfigError with everything that makes no sense."""
    found = []
    if wish.method not in METHODS:
        found.append(f"--method is {wish.method!r}: use one of {', '.join(METHODS)}")
    if wish.start not in STARTS:
        found.append(f"--start is {wish.start!r}: use one of {', '.join(STARTS)}")
    for name in ("tokens", "streams", "batch_rows", "draft_vocab", "unrolled"):
        if getattr(wish, name) < 1:
            found.append(f"--{name.replace('_', '-')} is {getattr(wish, name)}: at least 1")
    if wish.inner is not None and wish.inner < 1:
        found.append(f"--inner is {wish.inner}: at least 1")
    for name in ("rounds", "rate"):
        if not 0 < getattr(wish, name) < 1000:
            found.append(f"--{name} is {getattr(wish, name)}: a number above 0, below 1000")
    if found:
        raise ConfigError(found)


class Folder:
    """The head's folder: what is shipped, and `work` with everything to go on from."""

    def __init__(self, out: str) -> None:
        """Raises ConfigError if it cannot be written."""
        self.path = pathlib.Path(out)
        self.work = self.path / "work"
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            write_whole(self.work / "writable", b"")
            (self.work / "writable").unlink()
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"--out {out} cannot be written: {reason}") from error
        self.tokens, self.held_out = self.work / "tokens", self.work / "held_out"
        self.checkpoint = self.work / "checkpoint.safetensors"
        self.log = self.work / "log.jsonl"

    def features(self, method: Method) -> pathlib.Path:
        """Of the conversations; heads of another kind take other ones."""
        return self.work / f"features-{method}"

    def claim(self, wish: Wish, model: Model) -> None:
        """Raises ConfigError if conversations of another kind are in it."""
        facts = {
            "model": model.path,
            "weights": f"{model.weights}, {model.dtype}",
            "data": None if wish.data is None else _digest(wish.data),
            "own_held_out": wish.own_held_out,
            "manner": json.loads(json.dumps(dataclasses.asdict(wish.manner))),
        }
        path = self.work / "conversations.json"
        if path.is_file():
            try:
                theirs = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is damaged: {error}") from error
            differ = [key for key in facts if theirs.get(key) != facts[key]]
            if differ:
                told = "; ".join(f"{key} {theirs.get(key)}, now {facts[key]}" for key in differ)
                raise ConfigError(
                    f"--out {self.path} holds conversations of another training ({told}): name "
                    "another folder, or remove its work folder"
                )
        write_whole(path, (json.dumps(facts, indent=1) + "\n").encode())


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The conversations of a file, apart for training and for measuring; None: the target's own."""

    trained: Sequence[Messages] | None
    held_out: Sequence[Messages] | None
    n_held_out: int

    @property
    def n_trained(self) -> int | None:
        return None if self.trained is None else len(self.trained)


def given_by(wish: Wish) -> Given:
    """Raises ConfigError for a file that cannot be read so."""
    if wish.data is None:
        return Given(None, None, len(HELD_OUT) + wish.own_held_out)
    lines = read_questions(os.fspath(wish.data))
    count = max(1, min(HELD_OUT_MAX, len(lines) // HELD_OUT_SHARE))
    # Spread over the file, whatever it is ordered by.
    step = len(lines) / count
    chosen = {int(n * step) for n in range(count)}
    held_out = [line for n, line in enumerate(lines) if n in chosen]
    return Given([line for n, line in enumerate(lines) if n not in chosen], held_out, len(held_out))
