"""Steps, checkpoints and batches of a small training on features that are not a model's."""

import itertools
import pathlib

import numpy as np
import pytest
import torch

from aserve.errors import ConfigError
from aserve.training.dataset import ASKED_WEIGHT, Dataset, Features, Order, frequent_tokens
from aserve.training.files import ANSWER, ASKED, GIVEN, Conversation, save_conversations
from aserve.training.network import Network
from aserve.training.objective import Goal
from aserve.training.start import Ends, first_weights
from aserve.training.target import Seen
from aserve.training.trainer import Progress, Schedule, Trainer
from tests.models import heads
from tests.models.families import VOCAB
from tests.training.test_network import spec_of
from tests.training.texts import Oracle

SCHEDULE = Schedule(rounds=2, rate=1e-2, seed=5, save_steps=3)


class Made:
    """Stands for a target: features that follow from the tokens."""

    def __init__(self, captured: tuple[int, ...]) -> None:
        self.captured, self.reads = captured, 0
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, 4 * heads.HIDDEN, generator=generator).bfloat16()

    def read(self, conversations: list[list[int]]) -> Seen:
        self.reads += 1
        rows = self.table[torch.tensor([t for tokens in conversations for t in tokens])]
        hidden = rows[:, 3 * heads.HIDDEN :]
        features = rows[:, : 3 * heads.HIDDEN] if self.captured else hidden
        return Seen(features, hidden, torch.zeros(len(rows), dtype=torch.int32))


@pytest.fixture
def files(tmp_path: pathlib.Path) -> list[pathlib.Path]:
    chance = np.random.default_rng(0)
    found = []
    for number in range(3):
        conversations = []
        for _ in range(5):
            length = int(chance.integers(6, 20))
            tokens = chance.integers(3, VOCAB, length).astype(np.int32)
            writers = np.full(length, ANSWER, dtype=np.uint8)
            writers[:3] = [GIVEN, ASKED, GIVEN]
            conversations.append(Conversation(tokens, writers))
        found.append(tmp_path / f"{number:05}.safetensors")
        save_conversations(found[-1], conversations)
    return found


def dataset(
    files: list[pathlib.Path], folder: pathlib.Path, method: str, bytes_max: int = 1 << 30
) -> tuple[Dataset, Made]:
    target = Made((0, 1, 2) if method == "eagle3" else ())
    features = Features(folder, target, bytes_max)  # type: ignore[arg-type]
    usable = torch.ones(VOCAB, dtype=torch.bool)
    return Dataset(files, features, Order(1, 40, 16), usable), target


def trainer(
    method: str, data: Dataset, path: pathlib.Path, schedule: Schedule = SCHEDULE
) -> Trainer:
    oracle = Oracle(method)
    spec = spec_of(oracle)
    rows = oracle.target_head.detach()[oracle.ids].bfloat16()
    weights = first_weights(
        spec, Ends(torch.ones(heads.HIDDEN), rows), torch.Generator().manual_seed(2)
    )
    goal = Goal(
        Network(spec, oracle.table.detach().bfloat16()), rows, 2 if method == "eagle3" else 1
    )
    return Trainer(goal, weights, data, schedule, path)


class Stopped(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_an_interrupted_training_ends_with_the_bits_of_an_undisturbed_one(
    method: str, files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    whole = trainer(method, dataset(files, tmp_path / "a", method)[0], tmp_path / "whole")
    told: list[Progress] = []
    whole.run(told.append)
    assert [one.step for one in told] == list(range(1, whole.steps + 1))
    assert whole.steps >= 8

    def stop(now: Progress) -> None:
        if now.step == 5:  # two steps after the last checkpoint
            raise Stopped

    path = tmp_path / "cut"
    with pytest.raises(Stopped):
        trainer(method, dataset(files, tmp_path / "b", method)[0], path).run(stop)
    again = trainer(method, dataset(files, tmp_path / "b", method)[0], path)
    assert again.step == 3
    again.run(lambda now: None)
    for name, w in whole.weights.items():
        assert torch.equal(w, again.weights[name]), name
    done = trainer(method, dataset(files, tmp_path / "b", method)[0], path)
    assert (done.step, done.tokens) == (whole.steps, whole.tokens)
    done.run(lambda now: pytest.fail("there was nothing left to do"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_training_lowers_the_loss(
    method: str, files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    schedule = Schedule(rounds=8, rate=3e-3, seed=5)
    learning = trainer(method, dataset(files, tmp_path / "f", method)[0], tmp_path / "c", schedule)
    told: list[float] = []
    learning.run(lambda now: told.append(now.loss))
    assert told[-1] < 0.9 * told[0]


def test_a_checkpoint_of_another_training_is_refused(
    files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    data, path = dataset(files, tmp_path / "f", "eagle3")[0], tmp_path / "checkpoint"
    trainer("eagle3", data, path).save()
    other = Schedule(rounds=2, rate=5e-3, seed=5)
    with pytest.raises(ConfigError, match=r"rate 0\.01, now 0\.005.*remove it to train anew"):
        trainer("eagle3", data, path, other)
    with pytest.raises(ConfigError, match="tokens"):
        trainer("eagle3", dataset(files[:2], tmp_path / "f", "eagle3")[0], path)
    with pytest.raises(ConfigError, match="other shapes"):
        trainer("eagle", data, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is damaged"):
        trainer("eagle3", data, path)


def test_a_round_has_every_conversation_once_and_rounds_differ(
    files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    data, _ = dataset(files, tmp_path / "f", "eagle3")
    rounds = [data.batches(n) for n in (0, 0, 1)]
    assert rounds[0] == rounds[1] != rounds[2]
    for batches in rounds:
        places = sorted(itertools.chain(*batches))
        assert places == [(file, n) for file in range(3) for n in range(5)]
    for batch in map(data.load, rounds[0]):
        assert batch.ids_BL.numel() <= 40 or len(batch.ids_BL) == 1
        assert batch.ids_BL.shape[1] <= 16
        assert batch.wanted_BL.unique().tolist() == pytest.approx([0.0, ASKED_WEIGHT, 1.0])
        padding = batch.ids_BL < 0
        assert not batch.wanted_BL[padding].any()
        assert not batch.features_BLF[padding].any()


def test_features_are_computed_once_and_again_when_the_disk_is_small(
    files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    data, target = dataset(files, tmp_path / "large", "eagle3")
    places = [(file, n) for file in (0, 1, 2, 0, 1, 2) for n in range(5)]
    whole = [data.load([place]) for place in places]
    assert target.reads == 3
    size = max(path.stat().st_size for path in (tmp_path / "large").iterdir())
    small, again = dataset(files, tmp_path / "small", "eagle3", bytes_max=size + size // 2)
    for place, batch in zip(places, whole, strict=True):
        assert torch.equal(small.load([place]).features_BLF, batch.features_BLF)
        assert len(list((tmp_path / "small").iterdir())) == 1
    assert again.reads == 6


def test_the_draft_vocabulary_is_what_answers_say_most(
    files: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    ids = frequent_tokens(files, 10, (2,))
    assert 2 in ids
    assert len(ids) == 10
    assert torch.equal(ids, ids.sort().values)
    every = frequent_tokens(files, 10_000, (2,))
    assert len(every) < VOCAB
    tokens = np.array([7, 7, 7, 9, 9, 5], dtype=np.int32)
    writers = np.array([GIVEN, ANSWER, ANSWER, ANSWER, ANSWER, ANSWER], dtype=np.uint8)
    path = tmp_path / "few.safetensors"
    save_conversations(path, [Conversation(tokens, writers)])
    assert frequent_tokens([path], 3, (2,)).tolist() == [2, 7, 9]
