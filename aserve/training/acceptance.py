"""How much of what a target says a head foresees: tokens per step of the target, bonus included.

Drafting as it is served, over text that the target wrote greedily: pairs of verified tokens go
through the head with the target's features, a tree grows below the last of them (Li et al. 2024,
"EAGLE-2"), the longest path that the text follows is accepted, and the target's own next token is
the bonus. The target itself is not run: at temperature 0 the text says what it would say.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aserve.models.eagle_spec import DraftHead
from aserve.runner.kv_store import KvStore
from aserve.tensor.ops import Attend, Tree
from aserve.training.files import ANSWER, Conversation
from aserve.training.target import PAGE_SIZE, Seen

TOGETHER = 64  # conversations


class TreeShape(NamedTuple):
    """`tokens` are verified together, the last one that is known included. Of each of the `width`
    likeliest nodes of a level come `width` children, `depth` times; then the likeliest nodes of all
    stay. Width 1 is a chain of `tokens` - 1."""

    width: int
    depth: int
    tokens: int


SHAPES = {
    "chain of 3": TreeShape(1, 2, 4),
    "tree of 8": TreeShape(4, 3, 8),
    "tree of 32": TreeShape(8, 5, 32),
}


@dataclasses.dataclass(slots=True)
class Measured:
    """`tokens` that `steps` of the target gave, the first of each answer left out; `accepted[n]`:
    steps that accepted n drafted tokens."""

    tokens: int = 0
    steps: int = 0
    accepted: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    def add(self, accepted: int, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens
        self.accepted[accepted] = self.accepted.get(accepted, 0) + 1


def measure(
    head: DraftHead, texts: Sequence[tuple[Conversation, Seen]], shape: TreeShape
) -> Measured:
    """Of the last answer of each conversation."""
    found = Measured()
    for start in range(0, len(texts), TOGETHER):
        some = [_Text(*one) for one in texts[start : start + TOGETHER]]
        _Drafting(head, [text for text in some if not text.is_over], shape).run(found)
    return found


def measure_all(
    head: DraftHead,
    texts: Sequence[tuple[Conversation, Seen]],
    shapes: Mapping[str, TreeShape] = SHAPES,
) -> dict[str, Measured]:
    return {name: measure(head, texts, shape) for name, shape in shapes.items()}


class _Text:
    """One conversation on its way: `known` tokens, `kv_len` pairs in the head's KV."""

    def __init__(self, conversation: Conversation, seen: Seen) -> None:
        self.length = min(len(conversation), len(seen.best_T))
        self.ids: list[int] = conversation.tokens[: self.length].tolist()
        self.features = seen.features_TF
        writers = conversation.writers[: self.length]
        start = self.length
        while start > 0 and writers[start - 1] == ANSWER:
            start -= 1
        self.known = start + 1  # the first of an answer comes with its prompt
        self.kv_len = 0
        self.pages = torch.zeros(0, dtype=torch.int32)

    @property
    def is_over(self) -> bool:
        return self.known < 2 or self.known >= self.length


class _Drafting:
    def __init__(self, head: DraftHead, texts: list[_Text], shape: TreeShape) -> None:
        self.head, self.texts, self.shape = head, texts, shape
        room = shape.width * (shape.depth + 1)
        first = 0
        for text in texts:
            count = -(-(text.length + room) // PAGE_SIZE)
            text.pages = torch.arange(first, first + count, dtype=torch.int32)
            first += count
        self.kv = KvStore(head.regions(), PAGE_SIZE, max(1, first))

    @torch.inference_mode()
    def run(self, found: Measured) -> None:
        while texts := [text for text in self.texts if not text.is_over]:
            roots_BH = self._extend(texts)
            for text, tree in zip(texts, self._grow(texts, roots_BH), strict=True):
                accepted = tree.followed(text.ids[text.known :], self.shape.tokens - 1)
                gained = min(accepted + 1, text.length - text.known)
                found.add(min(accepted, gained), gained)
                text.known += gained

    def _extend(self, texts: list[_Text]) -> Tensor:
        """[B, H] of the last verified pair of each."""
        counts = [text.known - 1 - text.kv_len for text in texts]
        ids = [t for text in texts for t in text.ids[text.kv_len + 1 : text.known]]
        features = torch.cat([text.features[text.kv_len : text.known - 1] for text in texts])
        starts = [text.kv_len for text in texts]
        attend = self._attend(texts, starts, counts, None)
        hidden = self.head.start(features.float())
        out_TH = self.head.forward(torch.tensor(ids), hidden, self.kv.layers, attend)
        for text in texts:
            text.kv_len = text.known - 1
        return out_TH[torch.tensor(counts).cumsum(0) - 1]

    def _grow(self, texts: list[_Text], roots_BH: Tensor) -> "list[_Tree]":
        trees = [_Tree() for _ in texts]
        frontier = [[-1]] * len(texts)  # nodes of whose rows children are drafted
        hidden_BWH = roots_BH[:, None]
        for level in range(self.shape.depth + 1):
            scores_BWC, ids_BWC = self._likeliest(hidden_BWH)
            rows = []
            for n, tree in enumerate(trees):
                drafted = (ids_BWC[n].tolist(), scores_BWC[n].tolist())
                frontier[n], of_rows = tree.grow(frontier[n], *drafted)
                rows.append(of_rows)
            if level < self.shape.depth:
                parents_BWH = torch.stack([hidden_BWH[n, of] for n, of in enumerate(rows)])
                hidden_BWH = self._level(texts, trees, frontier, parents_BWH)
        return trees

    def _level(
        self,
        texts: list[_Text],
        trees: "list[_Tree]",
        frontier: list[list[int]],
        parents_BWH: Tensor,
    ) -> Tensor:
        """[B, W, H] of nodes, whose KV comes after that of the levels above."""
        width = self.shape.width
        paths = [
            tree.place(node) for tree, nodes in zip(trees, frontier, strict=True) for node in nodes
        ]
        level = len(paths[0]) - 1
        ends = torch.arange(len(paths) + 1, dtype=torch.int32) * (level + 1)
        below = Tree(ends, torch.tensor(paths, dtype=torch.int32).flatten())
        starts = [text.kv_len + level * width for text in texts]
        attend = self._attend(texts, starts, [width] * len(texts), below)
        ids = [
            tree.tokens[node] for tree, nodes in zip(trees, frontier, strict=True) for node in nodes
        ]
        hidden_TH = parents_BWH.flatten(0, 1)
        out_TH = self.head.forward(torch.tensor(ids), hidden_TH, self.kv.layers, attend)
        return out_TH.view(len(texts), width, -1)

    def _likeliest(self, hidden_BWH: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probabilities, the target's ids) [B, W, width]."""
        logits_TV = self.head.logits(hidden_BWH.flatten(0, 1))
        top = logits_TV.topk(self.shape.width, dim=-1)
        scores = top.values - logits_TV.logsumexp(-1, keepdim=True)
        shape = (*hidden_BWH.shape[:2], self.shape.width)
        return scores.view(shape), self.head.token_ids(top.indices).view(shape)

    def _attend(
        self, texts: list[_Text], starts: list[int], counts: list[int], tree: Tree | None
    ) -> Attend:
        """Rows of each text with their KV from place `starts[n]` on; with a tree all of them stand
        at the same depth, that of their paths."""
        slots, positions = [], []
        depth = 0 if tree is None else int(tree.path_start_T1[1]) - 1
        for text, start, count in zip(texts, starts, counts, strict=True):
            places = torch.arange(start, start + count)
            slots.append(text.pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE)
            at = places if tree is None else torch.full((count,), text.kv_len + depth)
            positions.append(at)
        tables = torch.zeros(len(texts), max(len(t.pages) for t in texts), dtype=torch.int32)
        for row, text in enumerate(texts):
            tables[row, : len(text.pages)] = text.pages
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        return Attend(
            slots_T=torch.cat(slots).to(torch.int32),
            positions_T=torch.cat(positions).to(torch.int32),
            page_table_NP=tables,
            row_start_M=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            kv_len_N=torch.tensor(ends, dtype=torch.int32),
            tree=tree,
        )


class _Tree:
    """Drafted nodes in the order in which they were thought of."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._parents: list[int] = []  # -1: the last known token
        self._scores: list[float] = []  # sums of log-probabilities down to a node
        self._paths: dict[int, list[int]] = {-1: []}  # places of KV, of nodes that have some
        self._placed = 0

    def grow(
        self, parents: list[int], ids: list[list[int]], scores: list[list[float]]
    ) -> tuple[list[int], list[int]]:
        """Add the children of `parents`; (the likeliest of them, which of `parents` theirs are)."""
        added: list[tuple[float, int, int]] = []
        for row, parent in enumerate(parents):
            above = self._scores[parent] if parent >= 0 else 0.0
            for token, score in zip(ids[row], scores[row], strict=True):
                added.append((-(above + score), len(self.tokens), row))
                self.tokens.append(token)
                self._parents.append(parent)
                self._scores.append(above + score)
        likeliest = sorted(added)[: len(ids[0])]
        return [node for _, node, _ in likeliest], [row for _, _, row in likeliest]

    def place(self, node: int) -> list[int]:
        """The path of a node that gets KV now: after all that have some."""
        self._paths[node] = [*self._paths[self._parents[node]], self._placed]
        self._placed += 1
        return self._paths[node]

    def followed(self, text: Sequence[int], count: int) -> int:
        """How many tokens of `text` the likeliest `count` nodes hold as a path from the root. A
        node's parent is at least as likely, so those nodes are a tree."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self._scores[node], node))
        stay = {(self._parents[node], self.tokens[node]): node for node in order[:count]}
        at = -1
        for depth, token in enumerate(text):
            if (at, token) not in stay:
                return depth
            at = stay[at, token]
        return len(text)
