"""Trees of drafted tokens: cutting them, and what a path through one keeps. Pure tuples."""

from collections.abc import Sequence
from typing import NamedTuple

from aserve.core.message import Drafting


class Draft(NamedTuple):
    """A tree without its root. `parents` index into `tokens`, -1 is the root; they come first."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


NO_DRAFT = Draft((), ())


def is_token(token: int) -> bool:
    """Whether some vocabulary could have it: all ranks look it up, and fold it into digests."""
    return not token >> 31


def row_parents(draft: Draft) -> tuple[int, ...]:
    """The `Rows.parents` of the root followed by the draft."""
    return (-1, *[parent + 1 for parent in draft.parents])


def depths(parents: Sequence[int]) -> list[int]:
    """Of each node, 0 where the parent is -1."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def malformed(draft: Draft, asked: Drafting) -> str | None:
    """What is wrong with a draft that a rank sent; None: nothing."""
    n_tokens = len(draft.tokens)
    if n_tokens != len(draft.parents):
        return f"drafted {n_tokens} tokens with {len(draft.parents)} parents"
    if n_tokens > asked.tokens:
        return f"drafted {n_tokens} tokens, at most {asked.tokens} were asked for"
    if any([not is_token(token) for token in draft.tokens]):
        return f"drafted {draft.tokens}, not all of them tokens"
    n_children = [0] * (n_tokens + 1)  # the root's last
    levels = [0] * (n_tokens + 1)
    for node, parent in enumerate(draft.parents):
        if not -1 <= parent < node:
            return f"drafted node {node} below {parent}, which is not before it"
        n_children[parent] += 1
        levels[node] = levels[parent] + 1
    if max(levels) > asked.depth:
        return f"drafted {max(levels)} levels, at most {asked.depth} were asked for"
    if max(n_children) > asked.topk:
        return f"drafted {max(n_children)} children, at most {asked.topk} were asked for"
    return None


def cut(draft: Draft, n_max: int, depth_max: int) -> Draft:
    """The first `n_max` nodes no deeper than `depth_max` below the root; each with its parent."""
    n_nodes = len(draft.tokens)
    if n_nodes <= n_max and n_nodes <= depth_max:
        return draft
    tokens: list[int] = []
    parents: list[int] = []
    places: dict[int, int] = {-1: -1}  # of the nodes kept
    node_depths = depths(draft.parents)
    for node, parent in enumerate(draft.parents):
        if len(tokens) >= n_max:
            break
        if parent in places and node_depths[node] < depth_max:
            places[node] = len(tokens)
            tokens.append(draft.tokens[node])
            parents.append(places[parent])
    return Draft(tuple(tokens), tuple(parents))


def is_path(parents: Sequence[int], path: Sequence[int]) -> bool:
    """Whether each row's parent is the row before it, from a root down."""
    before = -1
    for row in path:
        if not 0 <= row < len(parents) or parents[row] != before:
            return False
        before = row
    return True


def moved(path: Sequence[int], start: int) -> tuple[list[int], list[int]]:
    """From where and to where KV goes, by index in the sequence, when `path` is kept.

    No place is written before it was read, copied pair by pair or all at once: a path never falls
    behind its own depth.
    """
    places = [(start + row, start + depth) for depth, row in enumerate(path) if row != depth]
    return [place for place, _ in places], [place for _, place in places]
