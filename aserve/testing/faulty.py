"""Planted faults: each a small lie told to one place from outside, and the laws that must tell.

A simulator that finds nothing is worth what it would have found. So every fault here has a name, a
scenario in which it matters, and the laws (usually one) that may be the first to break.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from aserve.testing import faults_of_lag as lag
from aserve.testing import faults_of_planner as planner
from aserve.testing import faults_of_ranks as ranks
from aserve.testing.laws import Law
from aserve.testing.swap import Swap

SEEDS = range(40)


class Fault(msgspec.Struct, frozen=True):
    """`plant` replaces what it replaces through a `Swap`, which puts everything back."""

    name: str
    plant: Callable[[Swap], None]
    laws: tuple[Law, ...]
    scenario: str = "swarm"
    forced: Mapping[str, Any] = {}


TREES = {"draft_max": 5, "adaptive": False, "max_tokens_max": 24, "troubles": 0}
CALM = {"troubles": 0}

FAULTS: tuple[Fault, ...] = (
    Fault("page given twice", planner.page_given_twice, (Law.HOLDERS, Law.PAGES)),
    Fault("page never given back", planner.page_kept, (Law.PAGES,)),
    Fault("drop forgotten", planner.drop_forgotten, (Law.HOLDERS, Law.IDLE, Law.RANK)),
    Fault("last commit forgotten", planner.last_commit_forgotten, (Law.DIGEST, Law.RANK)),
    Fault(
        "cache evicts what is in use",
        planner.locked_evicted,
        (Law.PAGES, Law.HOLDERS),
        "shared-prefixes",
        {"pages_spare": 0.2},
    ),
    Fault(
        "prefix hit one page too long",
        planner.hit_too_long,
        (Law.TEXT, Law.LEADER),
        "shared-prefixes",
    ),
    Fault(
        "prefix of another tenant",
        planner.hit_without_salt,
        (Law.TENANTS,),
        "shared-prefixes",
        {"priorities": True},
    ),
    Fault("page cached before it is computed", planner.stored_early, (Law.LEADER,)),
    Fault("pages freed while rows are in flight", planner.left_at_once, (Law.WRITES,), "aborts"),
    Fault("surplus pages freed", planner.surplus_freed, (Law.HOLDERS, Law.DIGEST), "trees"),
    Fault("path of a commit off by one", planner.path_off, (Law.TEXT,), "trees", TREES),
    Fault(
        "step over with its first report",
        planner.merged_early,
        (Law.DIGEST, Law.WRITES, Law.BOUNDS),
        "swarm",
        {"dp": 2, **CALM},
    ),
    Fault("stop ids ignored", planner.stops_ignored, (Law.TEXT, Law.END)),
    Fault("too many rows in a step", planner.rows_unbounded, (Law.BOUNDS,), "long-prompts"),
    Fault("retraction loses a token", planner.retraction_loses_token, (Law.TEXT,), "tight-pool"),
    Fault("restart loses a token", planner.restart_loses_token, (Law.TEXT,), "crashes"),
    Fault(
        "restart repeats prompt logprobs",
        planner.restart_repeats_logprobs,
        (Law.LOGPROBS,),
        "crashes",
        {"prompt_logprobs": 1.0},
    ),
    Fault("outputs lost on the way", planner.outputs_lost, (Law.TEXT,), "crashes"),
    Fault(
        "leader sleeps through an arrival",
        planner.wake_lost,
        (Law.STALL,),
        "swarm",
        {"pace_ms": 5.0, **CALM},
    ),
    Fault("compaction skipped", ranks.compaction_skipped, (Law.TEXT,), "trees", TREES),
    Fault("compaction backwards", ranks.compaction_backwards, (Law.TEXT,), "trees", TREES),
    Fault(
        "compaction on all stages but one",
        ranks.compaction_on_one_stage,
        (Law.TEXT,),
        "trees",
        {**TREES, "pp": 2},
    ),
    Fault(
        "cache forgets what a drafter's KV was made of",
        planner.pairs_forgotten,
        (Law.PAIRS,),
        "pairs",
    ),
    Fault(
        "size of drafts told wrong",
        planner.drafting_told_wrong,
        (Law.DIGEST,),
        "drafts-of-any-size",
    ),
    Fault(
        "rows planned before the drafts are known",
        planner.planned_behind_drafts,
        (Law.LAG,),
        "drafts-of-any-size",
    ),
    Fault(
        "drafts of the size before",
        ranks.larger_drafts,
        (Law.DIGEST,),
        "drafts-of-any-size",
    ),
    Fault("rows see their siblings", ranks.siblings_seen, (Law.TEXT,), "trees", TREES),
    Fault("tree positions by row", ranks.positions_by_row, (Law.TEXT,), "trees", TREES),
    Fault("a stage skips a step", ranks.stage_skips, (Law.TEXT, Law.READS), "deep-pipeline"),
    Fault("hidden bundle of the step before", ranks.old_bundle, (Law.TEXT,), "deep-pipeline"),
    Fault(
        "rows miscounted in a gather",
        ranks.rows_miscounted,
        (Law.RANK, Law.PLANES),
        "swarm",
        {"dp": 2, **CALM},
    ),
    Fault(
        "rows of a split prompt left in pieces", ranks.cp_order_lost, (Law.TEXT,), "split-prompts"
    ),
    Fault(
        "last rows picked in the wrong order",
        ranks.pick_order_lost,
        (Law.TEXT, Law.LOGPROBS),
        "split-prompts",
    ),
    Fault(
        "sum over the wrong group",
        ranks.wrong_group,
        (Law.TEXT, Law.PLANES),
        "swarm",
        {"dp": 2, "attn_tp": 2, **CALM},
    ),
    Fault(
        "one rank in another group",
        ranks.one_in_another_group,
        (Law.PLANES,),
        "swarm",
        {"dp": 2, "attn_tp": 2, **CALM},
    ),
    Fault("expert rows not put back", ranks.experts_astray, (Law.TEXT,), "travelling-experts"),
    Fault(
        "stale page table after a retraction",
        ranks.stale_table,
        (Law.READS, Law.TEXT),
        "tight-pool",
    ),
    Fault("noise keyed by step", ranks.noise_by_step, (Law.TEXT,), "swarm", {"seeded": 1.0}),
    Fault(
        "rule kept from the draft before",
        ranks.rule_by_root,
        (Law.TEXT, Law.END),
        "trees",
        {**TREES, "structured": 1.0},
    ),
    Fault("lagging row of the token before", lag.token_before, (Law.TEXT, Law.END), "lagging"),
    Fault(
        "lagging token not told to the stage",
        lag.token_kept,
        (Law.TEXT, Law.END),
        "lagging-in-groups",
    ),
    Fault(
        "result of a row too many committed",
        lag.surplus_committed,
        (Law.DIGEST, Law.RANK),
        "lagging",
    ),
    Fault(
        "row too many counts as computed", lag.surplus_cached, (Law.PAGES, Law.LEADER), "lagging"
    ),
    Fault(
        "pages freed while a row too many is in flight",
        lag.surplus_freed_early,
        (Law.WRITES,),
        "lagging",
    ),
    Fault(
        "rule moved on twice by one token",
        lag.rule_moved_twice,
        (Law.TEXT, Law.END),
        "lagging",
        {"structured": 1.0},
    ),
    Fault("row planned behind the last draw", lag.drawn_beyond_the_end, (Law.LAG,), "lagging"),
    Fault(
        "commits of one sequence out of order",
        lag.commits_reversed,
        (Law.DIGEST, Law.RANK),
        "lagging-far",
    ),
    Fault("a rank keeps what was dropped", ranks.dropped_kept, (Law.IDLE, Law.RANK)),
    Fault("restart without a cause", planner.restart_imagined, (Law.RESTARTS,), "swarm", CALM),
    Fault(
        "a rank does not answer", ranks.question_lost, (Law.ANSWERS,), "swarm", {**CALM, "asked": 2}
    ),
    Fault("digest not folded", ranks.digest_not_folded, (Law.DIGEST,)),
    Fault("one rank ignores drops", ranks.drops_ignored, (Law.DIGEST,)),
    Fault("a plan does not reach a rank", ranks.plan_lost, (Law.PLANES, Law.RANK, Law.STALL)),
)
BY_NAME = {fault.name: fault for fault in FAULTS}


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """While it lasts, every world has the fault."""
    swap = Swap()
    try:
        fault.plant(swap)
        yield
    finally:
        swap.back()
