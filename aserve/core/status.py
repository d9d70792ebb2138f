"""What the planner tells of itself: counts for metrics, and who waits for whom for a doctor."""

import msgspec

from aserve.core.acceptance import DraftStatistics
from aserve.core.group import Group


class PlannerStatistics(msgspec.Struct, frozen=True):
    """The state now, then counts since the start."""

    running: int
    waiting: int
    kv_pages_total: int
    kv_pages_used: int  # held by sequences or kept for them by a lock
    kv_pages_free: int
    kv_pages_cached: int  # in the cache, evictable at any moment
    prefix_query_tokens: int  # tokens of admitted sequences, and how many the cache had
    prefix_hit_tokens: int
    steps: int
    rows: int
    requests: int
    retractions: int
    chunks_warning: str = ""  # why chunks are of fixed length though dynamic ones were asked for
    drafts: DraftStatistics = DraftStatistics()


class RankProgress(msgspec.Struct, frozen=True):
    """The last step that a rank reported, -1 before the first, and the digest it sent with it."""

    rank: int
    step: int
    digest: int


class StepInFlight(msgspec.Struct, frozen=True):
    """A plan without all its reports; `missing` are the ranks whose are."""

    step: int
    microbatch: int
    missing: tuple[int, ...]


class PageLedger(msgspec.Struct, frozen=True):
    """Where the pages of one group are; `evictable` of the cached ones nobody holds."""

    free: int
    owned: int
    cached: int
    evictable: int


def ledger(group: Group) -> PageLedger:
    pool = group.pool
    return PageLedger(pool.n_free, pool.n_owned, pool.n_cached, group.tree.n_evictable)


class PlannerState(msgspec.Struct, frozen=True):
    """Everything a doctor asks first. Ledgers and `running` are by group."""

    step: int  # the next plan's
    digest: int
    ranks: tuple[RankProgress, ...]
    in_flight: tuple[StepInFlight, ...]
    busy: tuple[bool, ...]  # by microbatch: no more of it may be planned
    waiting: int
    running: tuple[int, ...]
    prefilling: tuple[int, ...]
    leaving: tuple[int, ...]  # over, but holding pages until rows in flight landed
    yielding: tuple[int, ...]  # to be retracted then
    pages: tuple[PageLedger, ...]
    chunks: str  # how prompt chunks are sized, in words
    draft_sizes: str  # and drafts
    drafts: DraftStatistics = DraftStatistics()
