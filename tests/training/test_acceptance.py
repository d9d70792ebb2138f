"""Tokens per step against a simulation that computes every node of every tree from nothing."""

import functools
import pathlib

import pytest
import torch

from aserve.training.acceptance import SHAPES, Measured, TreeShape, measure
from aserve.training.dataset import batch_of
from aserve.training.files import ANSWER, Conversation
from aserve.training.network import Network
from aserve.training.objective import Goal
from aserve.training.target import Seen
from aserve.training.trainer import chain_of
from tests.models.families import VOCAB
from tests.training.texts import PROMPT_LEN, Oracle

LENGTHS = (17, 26, 21)


@functools.cache
def texts(method: str) -> tuple[Oracle, list[tuple[Conversation, Seen]]]:
    oracle = Oracle(method)
    return oracle, [oracle.text(seed, length) for seed, length in enumerate(LENGTHS)]


def accepted(
    oracle: Oracle, ids: list[int], features: torch.Tensor, shape: TreeShape, known: int
) -> int:
    """Of one step, by the definition of the tree."""
    nodes: dict[tuple[int, ...], tuple[float, int]] = {}  # path: (-score, when it was made)
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(shape.depth + 1):
        children = []
        for path in frontier:
            spread = oracle.after(ids[:known], features, path)
            for token in spread.argsort(descending=True)[: shape.width].tolist():
                score = float(spread[token]) - (nodes[path][0] if path else 0.0)
                nodes[*path, token] = (-score, len(nodes))
                children.append((*path, token))
        frontier = sorted(children, key=lambda path: nodes[path])[: shape.width]
    stay = set(sorted(nodes, key=lambda path: nodes[path])[: shape.tokens - 1])
    count = 0
    while known + count < len(ids) and tuple(ids[known : known + count + 1]) in stay:
        count += 1
    return count


def simulated(method: str, shape: TreeShape) -> Measured:
    found = Measured()
    oracle, pairs = texts(method)
    for conversation, seen in pairs:
        ids = conversation.tokens.tolist()
        known = PROMPT_LEN + 1
        while known < len(ids):
            count = accepted(oracle, ids, seen.features_TF.float(), shape, known)
            gained = min(count + 1, len(ids) - known)
            found.add(min(count, gained), gained)
            known += gained
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("shape", [TreeShape(1, 2, 4), TreeShape(3, 2, 8), TreeShape(2, 1, 3)])
def test_acceptance_is_that_of_a_plain_simulation(
    method: str, shape: TreeShape, tmp_path: pathlib.Path
) -> None:
    oracle, pairs = texts(method)
    found = measure(oracle.load(tmp_path), pairs, shape)
    assert found == simulated(method, shape)
    assert found.tokens == sum(length - PROMPT_LEN - 1 for length in LENGTHS)
    assert 1.1 < found.per_step < shape.tokens  # neither nothing nor everything: it can differ


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_the_live_chain_says_what_the_served_head_does(method: str, tmp_path: pathlib.Path) -> None:
    oracle, pairs = texts(method)
    head = oracle.load(tmp_path)
    network = Network(head.spec, oracle.table.detach())
    goal = Goal(network, oracle.target_head.detach(), 1)
    usable = torch.ones(VOCAB, dtype=torch.bool)
    # Side by side, so that all but the longest are padded.
    batches = [batch_of(pairs[:2], usable), batch_of(pairs[2:], usable)]
    ids = None if method == "eagle" else oracle.ids
    live = chain_of(goal, oracle.w, batches, ids)
    assert live == pytest.approx(measure(head, pairs, SHAPES["chain of 3"]).per_step)


def test_a_text_without_an_answer_counts_nothing(tmp_path: pathlib.Path) -> None:
    oracle, pairs = texts("eagle3")
    head = oracle.load(tmp_path)
    conversation, seen = pairs[0]
    silent = Conversation(conversation.tokens, conversation.writers * 0)
    assert measure(head, [(silent, seen)], SHAPES["tree of 8"]).steps == 0
    assert ANSWER not in silent.writers
