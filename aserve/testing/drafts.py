"""Guesses of what comes next: trees whose right path winds between decoys.

The guesser is told the right tokens and says wrong ones on purpose, so that the rows that a tree
keeps are seldom its first ones: who forgets to compact reads decoys for ever after.
"""

from collections.abc import Callable, Sequence
from random import Random

from aserve.core.message import Drafting

# The right tokens of a sequence from its n-th generated one on, perhaps none.
Guess = Callable[[int, int], Sequence[int]]


def draft(
    random: Random, right: Sequence[int], asked: Drafting, vocab: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens, parents) within what is asked; a parent is an earlier index, -1 the root.

    Siblings have different tokens. The right path is there as far as luck takes it.
    """
    n_nodes = random.randint(0, asked.tokens)
    tokens: list[int] = []
    parents: list[int] = []
    levels = {-1: 0}
    at, depth = -1, 0  # the end of the right path so far
    while len(tokens) < n_nodes:
        has_room = levels[at] < asked.depth and parents.count(at) < asked.topk
        if depth < len(right) and has_room and random.random() < 0.55:
            parents.append(at)
            tokens.append(right[depth])
            at, depth = len(tokens) - 1, depth + 1
            levels[at] = depth
            continue
        # A decoy, beside the right token or below an earlier node.
        below = at if not tokens or random.random() < 0.7 else random.randrange(len(tokens))
        if levels[below] == asked.depth or parents.count(below) == asked.topk:
            break
        taken = {tokens[node] for node, parent in enumerate(parents) if parent == below}
        if below == at and depth < len(right):
            taken.add(right[depth])
        free = [token for token in range(vocab) if token not in taken]
        if not free:
            break
        parents.append(below)
        tokens.append(random.choice(free))
        levels[len(tokens) - 1] = levels[below] + 1
    return tuple(tokens), tuple(parents)
