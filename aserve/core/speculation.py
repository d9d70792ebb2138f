"""What the planner may ask of a drafter: the largest draft, and whether less is ever asked for."""

from typing import NamedTuple

from aserve.core.config import Spec
from aserve.core.message import NO_DRAFTING, Drafting

# What a method drafts where the configuration does not say.
OWN: dict[str, Drafting] = {
    "none": NO_DRAFTING,
    "ngram": Drafting(
        depth=10, topk=1, tokens=10
    ),  # costs nothing, is right for long or not at all
    "draft": Drafting(depth=4, topk=1, tokens=4),
    "eagle": Drafting(depth=6, topk=4, tokens=15),  # with its root 16 rows: a tile's
    "eagle3": Drafting(depth=6, topk=4, tokens=15),
}
# Their KV of a token depends on the token after it.
BIGRAM_METHODS = ("eagle", "eagle3")


class Speculation(NamedTuple):
    """`most` bounds every draft. With `adaptive` each step's are as large as pays, perhaps none.

    `bigrams`: the drafter's KV at a position depends on the token after it too, so a cached page
    is good for those only who go on as its writer did.
    """

    most: Drafting = NO_DRAFTING
    adaptive: bool = False
    bigrams: bool = False


def speculation_of(spec: Spec) -> Speculation:
    """What a configuration allows, with the method's own size where it is silent."""
    own = OWN[spec.method]
    if not own.tokens:
        return Speculation()
    topk = own.topk if spec.topk is None else spec.topk
    depth, tokens = spec.depth, spec.tokens
    if topk == 1:  # one says it all
        depth = depth or tokens
        tokens = tokens or depth
    most = bounded(Drafting(depth or own.depth, topk, tokens or own.tokens))
    return Speculation(most, spec.adaptive, spec.method in BIGRAM_METHODS)


def bounded(drafting: Drafting) -> Drafting:
    """The same drafts by their tightest bounds.

    A draft grows level by level from the `topk` best nodes of the level before, `topk` children
    each: no more tokens than that gives, no more levels than tokens.
    """
    depth, topk, tokens = drafting.depth, drafting.topk, drafting.tokens
    tokens = min(tokens, topk + (depth - 1) * topk * topk)
    return Drafting(min(depth, tokens), min(topk, tokens), tokens)
