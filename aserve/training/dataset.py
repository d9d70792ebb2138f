"""Token files and what the target makes of them, as batches in an order that follows from a seed.

Features of a file are computed when first wanted and kept on disk up to a bound, so memory holds
one batch; the oldest go first, and are computed again in the next round.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence

import numpy as np
import safetensors
import torch
from torch import Tensor

from aserve.training.files import ANSWER, ASKED, Conversation, load_conversations, save_tensors
from aserve.training.objective import Batch
from aserve.training.target import Seen, Target

ASKED_WEIGHT = 0.3  # of what the target wrote as the user: its own words, but not what is served
MIXED_FILES = 16  # whose conversations share batches
Place = tuple[int, int]  # (file, conversation in it)


def wanted(writers: np.ndarray) -> Tensor:
    """How much each token counts."""
    weights = np.zeros(len(writers), dtype=np.float32)
    weights[writers == ANSWER] = 1.0
    weights[writers == ASKED] = ASKED_WEIGHT
    return torch.from_numpy(weights)


class Features:
    """`Seen` of token files, one file each."""

    def __init__(self, folder: pathlib.Path, target: Target, bytes_max: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._target, self._bytes_max = folder, target, bytes_max
        self._open: dict[pathlib.Path, safetensors.safe_open] = {}

    def rows(self, tokens: pathlib.Path, rows: slice) -> Seen:
        """Some rows of a file's, computing all of them if need be."""
        path = self._folder / tokens.name
        if path not in self._open:
            if not path.is_file():
                self._compute(tokens, path)
            self._open[path] = safetensors.safe_open(path, framework="pt")
        file = self._open[path]
        hidden = file.get_slice("hidden")[rows]
        # EAGLE's features are the rows themselves, which are stored once.
        has_features = "features" in file.keys()  # noqa: SIM118
        features = file.get_slice("features")[rows] if has_features else hidden
        return Seen(features, hidden, file.get_slice("best")[rows])

    def _compute(self, tokens: pathlib.Path, path: pathlib.Path) -> None:
        conversations = load_conversations(tokens)
        seen = self._target.read([one.tokens.tolist() for one in conversations])
        parts = {"hidden": seen.hidden_TH, "best": seen.best_T}
        if self._target.captured:
            parts["features"] = seen.features_TF
        self._make_room(sum(part.nbytes for part in parts.values()))
        save_tensors(path, parts)

    def _make_room(self, n_bytes: int) -> None:
        files = sorted(self._folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)
        held = sum(path.stat().st_size for path in files)
        while files and held + n_bytes > self._bytes_max:
            oldest = files.pop(0)
            held -= oldest.stat().st_size
            self._open.pop(oldest, None)
            oldest.unlink()


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """`rows` tokens or so, padding included, in a batch; at most `len_max` of a conversation."""

    seed: int
    rows: int
    len_max: int


class Dataset:
    """`usable_V`: which tokens of the target can be drafted."""

    def __init__(
        self, files: Sequence[pathlib.Path], features: Features, order: Order, usable_V: Tensor
    ) -> None:
        self._files, self._features, self._order = list(files), features, order
        self._usable = usable_V
        self._conversations = [load_conversations(path) for path in self._files]
        self._ends = [np.cumsum([0, *map(len, file)]) for file in self._conversations]
        self.n_tokens = sum(int(ends[-1]) for ends in self._ends)
        self.n_conversations = sum(map(len, self._conversations))

    def batches(self, round_: int) -> list[list[Place]]:
        """All conversations once, in the order of this round; those of a batch are alike long."""
        chance = np.random.default_rng([self._order.seed, round_])
        files = chance.permutation(len(self._files)).tolist()
        found: list[list[Place]] = []
        for start in range(0, len(files), MIXED_FILES):
            places = [
                (file, place)
                for file in files[start : start + MIXED_FILES]
                for place, one in enumerate(self._conversations[file])
                if len(one) > 2
            ]
            group = list(self._cut([places[n] for n in chance.permutation(len(places))]))
            found += [group[n] for n in chance.permutation(len(group))]
        return found

    def _cut(self, places: list[Place]) -> Iterator[list[Place]]:
        places = sorted(places, key=self._length)
        batch: list[Place] = []
        for place in places:
            if batch and self._length(place) * (len(batch) + 1) > self._order.rows:
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch

    def _length(self, place: Place) -> int:
        return min(len(self._conversations[place[0]][place[1]]), self._order.len_max)

    def load(self, places: Sequence[Place]) -> Batch:
        parts = []
        for file, number in places:
            start = int(self._ends[file][number])
            rows = slice(start, start + self._length((file, number)))
            conversation = self._conversations[file][number]
            parts.append((conversation, self._features.rows(self._files[file], rows)))
        return batch_of(parts, self._usable)


def batch_of(parts: Sequence[tuple[Conversation, Seen]], usable_V: Tensor) -> Batch:
    """Conversations, cut to what was seen of them, side by side."""
    length = max(len(seen.best_T) for _, seen in parts)
    shape = (len(parts), length)
    first = parts[0][1]
    batch = Batch(
        ids_BL=torch.full(shape, -1, dtype=torch.int64),
        wanted_BL=torch.zeros(shape),
        features_BLF=first.features_TF.new_zeros(*shape, first.features_TF.shape[1]),
        hidden_BLH=first.hidden_TH.new_zeros(*shape, first.hidden_TH.shape[1]),
        usable_BL=torch.zeros(shape),
    )
    for row, (conversation, seen) in enumerate(parts):
        n_tokens = len(seen.best_T)
        batch.ids_BL[row, :n_tokens] = torch.from_numpy(conversation.tokens[:n_tokens]).long()
        batch.wanted_BL[row, :n_tokens] = wanted(conversation.writers[:n_tokens])
        batch.features_BLF[row, :n_tokens] = seen.features_TF
        batch.hidden_BLH[row, :n_tokens] = seen.hidden_TH
        batch.usable_BL[row, :n_tokens] = usable_V[seen.best_T.long()].float()
    return batch


def frequent_tokens(files: Sequence[pathlib.Path], count: int, always: Sequence[int]) -> Tensor:
    """int64 ids, ascending: `always`, and the most frequent tokens of the answers, `count` in all.

    Fewer if the answers have fewer.
    """
    seen: dict[int, int] = {}
    for path in files:
        for one in load_conversations(path):
            ids, counts = np.unique(one.tokens[one.writers != 0], return_counts=True)
            for token, n in zip(ids.tolist(), counts.tolist(), strict=True):
                seen[token] = seen.get(token, 0) + n
    ranked = sorted(seen, key=lambda token: (-seen[token], token))
    chosen = list(dict.fromkeys([*always, *ranked]))[:count]
    return torch.tensor(sorted(chosen), dtype=torch.int64)
