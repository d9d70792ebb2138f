"""Where ranks live: what the supervisor asks of a place, and which place a configuration means."""

import dataclasses
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from aserve.core.config import Config
from aserve.core.depth import depth_of
from aserve.core.layout import Grid
from aserve.planes.request import LeaderEnd
from aserve.text.tokenizer import Tokenizer

THREADS_WORLD_MAX = 4

Live = Literal["inline", "thread", "process", "cluster"]


@dataclasses.dataclass(frozen=True)
class Known:
    """What the users of a model need to know of it; its weights are the ranks' business."""

    name: str
    context_len: int
    vocab_size: int
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Ranks:
    """One start of all ranks: they have loaded and joined, and obey what is sent to `plane`.

    `pages_total` is what every rank has room for. `watch` raises PlaneTimeout when a rank of
    another process stands still. `dismiss` tells ranks that this process cannot end that they are
    needed no more; waits for them, not long.
    """

    plane: LeaderEnd
    pages_total: int
    watch: Callable[[], Awaitable[None]] | None = None
    dismiss: Callable[[], Awaitable[None]] | None = None


class Placement(Protocol):
    """Holds what outlives a restart (weights in threads, a directory, a listener)."""

    @property
    def known(self) -> Known: ...

    def open_ranks(self, pages_total: int | None) -> AbstractAsyncContextManager[Ranks]:
        """Start every rank, with pools of `pages_total` pages (None: the least they have room for).

        Whatever happens to a rank ends the block with an error: RankDied, PlaneMismatch,
        PlaneTimeout. When the block is over, nothing of any rank is left.
        """
        ...


def live_of(config: Config) -> Live:
    """`ranks.live`, or what auto means: one thread a rank while they are few, else processes."""
    if config.ranks.live != "auto":
        return config.ranks.live
    return "thread" if Grid(config.layout).world <= THREADS_WORLD_MAX else "process"


def in_flight_max(config: Config) -> int:
    """Plans that may be unanswered: one a stage, and those that overlap."""
    return depth_of(config.layout, config.schedule).in_flight_max


def threads_each(threads: int, n_ranks: int) -> tuple[int, ...]:
    """The kernel threads of each of the ranks of one host: at least one, the first have more."""
    least, more = divmod(threads, n_ranks)
    return tuple(max(1, least + (rank < more)) for rank in range(n_ranks))
