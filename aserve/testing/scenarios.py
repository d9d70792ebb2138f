"""Named runs: what each forces, and why it is worth a name. The seed decides the rest."""

from random import Random
from typing import Any

import msgspec

from aserve.testing.swarm import Setup, draw
from aserve.testing.world import Outcome, World


class Scenario(msgspec.Struct, frozen=True):
    name: str
    why: str
    forced: dict[str, Any] = {}


NO_TROUBLE = {"troubles": 0}
LONG = {"requests": 9, "pace_ms": 5.0, "dp": 2}
BUSY = {"requests": 9, "pace_ms": 0.0}
TREES = {"draft_max": 5, "adaptive": False}
DRAFTS = {"draft_max": 5, "adaptive": True, "page_size": 2, "crowd": True, "group_rows": 32}
LAG = {"pp": 1, "overlap": 1, "draft_max": 0}

SCENARIOS: tuple[Scenario, ...] = (
    Scenario("swarm", "everything by chance: features meet that nobody thought of together"),
    Scenario(
        "one-rank",
        "the planner and its pool alone; what fails here needs no grid",
        {"pp": 1, "dp": 1, "cp": 1, "attn_tp": 1, **NO_TROUBLE},
    ),
    Scenario(
        "tight-pool",
        "a pool for three of the many that grow in it: retraction at every turn",
        {"crowd": True, "aborts": 0.0, "running_max": 24, "group_rows": 32, "dp": 1, **NO_TROUBLE},
    ),
    Scenario(
        "trees",
        "drafts between decoys on pages of two: compaction crosses page borders",
        {**TREES, "page_size": 2, "max_tokens_max": 24, **NO_TROUBLE},
    ),
    Scenario(
        "trees-in-a-tight-pool",
        "retraction takes a draft with it, and surplus pages are all there is to give",
        {**TREES, "page_size": 2, "crowd": True, "group_rows": 32, "running_max": 24},
    ),
    Scenario(
        "drafts-of-any-size",
        "drafts are turned up, down and off as steps are timed, and rows lag wherever none is made",
        {**DRAFTS, "pp": 1, "overlap": 1, "running_max": 4, "jitter": 5.0, **NO_TROUBLE},
    ),
    Scenario(
        "drafts-of-any-size-in-a-pipeline",
        "each microbatch has drafts of its own size; crashes do not bring back an old one",
        {**DRAFTS, "pp": 2, "dp": 2, "troubles": 2, "trouble_kinds": ("crash", "slow")},
    ),
    Scenario(
        "pairs",
        "a drafter's KV depends on the token after it: prompts part just behind a border of pages",
        {
            **{"draft_max": 5, "bigrams": True, "page_size": 2, "prefix_cache": True},
            **{"shared_prefixes": True, "follow_ups": True, "n": 3, "requests": 9, **NO_TROUBLE},
        },
    ),
    Scenario(
        "idle-groups",
        "more attention groups than requests: some have no rows while others do",
        {"dp": 3, "requests": 2, "n": 1, **NO_TROUBLE},
    ),
    Scenario(
        "deep-pipeline",
        "three stages and two plans more than that in flight",
        {"pp": 3, "overlap": 2, **BUSY, **NO_TROUBLE},
    ),
    Scenario(
        "lagging",
        "rows are planned before their tokens are known; ends that nobody foresaw come too late",
        {**LAG, **BUSY, "stops": 0.3, "structured": 0.5, "max_tokens_max": 24, **NO_TROUBLE},
    ),
    Scenario(
        "lagging-in-groups",
        "whoever draws tells the whole stage what a row's token is before any rank embeds it",
        {**LAG, "dp": 2, "cp": 2, "attn_tp": 2, "max_tokens_max": 24, **NO_TROUBLE},
    ),
    Scenario(
        "lagging-far",
        "rows two and three draws ahead of what is known: several commits a plan",
        {**LAG, "overlap": 3, "link_ms": 2.0, "max_tokens_max": 24, "aborts": 0.5, **NO_TROUBLE},
    ),
    Scenario(
        "lagging-in-a-tight-pool",
        "no page for a row that can wait, and who is retracted has rows in flight",
        {**LAG, "crowd": True, "running_max": 24, "group_rows": 32, "dp": 1, **NO_TROUBLE},
    ),
    Scenario(
        "lagging-crashes",
        "ranks die with tokens that nobody was told: they are drawn again, and are the same",
        {**LAG, "troubles": 4, "trouble_kinds": ("crash", "hang"), "aborts": 0.5},
    ),
    Scenario(
        "long-prompts",
        "chunks of one prompt fill the pipe while others decode",
        {"pp": 2, "prompt_len_max": 60, "page_size": 4, "group_rows": 8, **NO_TROUBLE},
    ),
    Scenario(
        "dynamic-chunks",
        "chunk sizes come from what the stages report, steps that only measure first",
        {"pp": 2, "dynamic_chunks": True, "prompt_len_max": 400, "group_rows": 160, **NO_TROUBLE},
    ),
    Scenario(
        "split-prompts",
        "context parallelism: every rank must put the rows back in order",
        {"cp": 2, "prompt_len_max": 60, **NO_TROUBLE},
    ),
    Scenario(
        "travelling-experts",
        "rows go to their experts and come back; counts depend on values",
        {"attn_tp": 2, "dp": 2, "ep": 2, "moe_dp": 2, "expert_rows": "all_to_all", **NO_TROUBLE},
    ),
    Scenario(
        "shared-prefixes",
        "prompts that go on from each other, several choices each: the cache decides who computes",
        {"prefix_cache": True, "shared_prefixes": True, "follow_ups": True, "n": 3, **NO_TROUBLE},
    ),
    Scenario(
        "prompt-logprobs-again",
        "a retraction or restart computes prompt rows twice and must tell of them once",
        {"prompt_logprobs": 0.5, "crowd": True, "group_rows": 16, "troubles": 2},
    ),
    Scenario(
        "aborts",
        "half of the clients leave, at any moment, also in the one of their arrival",
        {"aborts": 0.5, **BUSY, **NO_TROUBLE},
    ),
    Scenario(
        "full-queue",
        "more arrive than may wait: 429 for them, nothing lost for the others",
        {"waiting_max": 4, "running_max": 1, **BUSY, **NO_TROUBLE},
    ),
    Scenario(
        "slow-links",
        "every message takes its own time, longer than a step",
        {"link_ms": 2.0, "pp": 2, "overlap": 1, **NO_TROUBLE},
    ),
    Scenario(
        "pauses",
        "links stand still, for less or more than the planes wait",
        {"troubles": 4, "trouble_kinds": ("pause", "delay"), **LONG},
    ),
    Scenario(
        "cut-links",
        "a link between leader, ranks or stages is gone for good",
        {"troubles": 2, "trouble_kinds": ("cut",)},
    ),
    Scenario(
        "crashes",
        "ranks die at any moment; clients see a pause and the text they would have had",
        {"troubles": 4, "trouble_kinds": ("crash",)},
    ),
    Scenario(
        "hangs",
        "ranks stop without dying: the planes must say who, or wait it out",
        {"troubles": 4, "trouble_kinds": ("hang", "slow"), **LONG},
    ),
    Scenario(
        "everything-at-once",
        "trees, a crowd in a tight pool, aborts and crashes in a pipeline of groups",
        {
            **{"crowd": True, **TREES, "aborts": 0.5, "troubles": 4, "pp": 2, "dp": 2},
            **{"overlap": 1, "prefix_cache": True, "prompt_logprobs": 0.5, "group_rows": 24},
        },
    ),
    Scenario(
        "crashes-with-trees",
        "what a restart forgets includes drafts, commits on their way and uncompacted pages",
        {"troubles": 4, "trouble_kinds": ("crash", "cut"), **TREES},
    ),
)
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def setup_of(name: str, seed: int) -> Setup:
    return draw(Random(seed), BY_NAME[name].forced)


def run_seed(name: str, seed: int) -> Outcome:
    """One world from its seed. Other worlds before it in this process change nothing."""
    return World(seed, setup_of(name, seed)).run()
