"""Small worlds in which chosen features are on and all others off, and the signs that they were."""

from collections.abc import Callable
from enum import StrEnum

from aserve.core.config import Cache, Config, Layout, Schedule, Spec
from aserve.core.message import Grammar, Sampling
from aserve.core.request import Request
from aserve.testing.arithmetic import RULE_KIND, Shape
from aserve.testing.swarm import Arrival, Setup
from aserve.testing.world import Outcome, World

PAGE_SIZE = 4
OUTPUT_LEN, LONG_OUTPUT_LEN = 8, 40
GROUP_REQUESTS = 6  # of each attention group, where few would not do
SHARED_PAGES = 2
LATER_MS = 200.0  # by then the first arrivals are over


class Feature(StrEnum):
    TP = "TP"
    PP = "PP"
    DPA = "DPA"
    CP = "CP"
    EP = "EP"
    MOE_DP = "moe_dp"
    CHUNKS = "chunked prefill"
    DYNAMIC = "dynamic chunks"
    PREFIX = "prefix cache"
    RETRACTION = "retraction"
    STRUCTURED = "structured output"
    LOGPROBS = "logprobs"
    SEED = "seeded sampling"
    OVERLAP = "overlap"
    SPECULATION = "speculative decoding"


CROWDED = frozenset([Feature.RETRACTION, Feature.OVERLAP])


def layout_of(on: frozenset[Feature]) -> Layout:
    dp, cp = 1 + (Feature.DPA in on), 1 + (Feature.CP in on)
    ep, moe_dp = 1 + (Feature.EP in on), 1 + (Feature.MOE_DP in on)
    attn_tp = 1 + (Feature.TP in on)
    while (dp * cp * attn_tp) % (ep * moe_dp):
        attn_tp *= 2  # experts cannot be split over fewer ranks
    return Layout(
        tp=dp * cp * attn_tp,
        pp=1 + (Feature.PP in on),
        dp=dp,
        cp=cp,
        ep=ep,
        moe_dp=moe_dp,
        cp_split="zigzag" if Feature.CHUNKS in on else "interleave",
        experts="all_to_all" if Feature.EP in on else "gathered",
    )


def spec_of(on: frozenset[Feature]) -> Spec:
    """Trees of pairs; with overlap only where they pay, since rows lag where none are made."""
    if Feature.SPECULATION not in on:
        return Spec()
    return Spec("eagle", depth=3, topk=2, tokens=4, adaptive=Feature.OVERLAP in on)


def setup_of(on: frozenset[Feature]) -> Setup:
    layout = layout_of(on)
    rows = 4 * PAGE_SIZE if Feature.CHUNKS in on else 64
    if on >= {Feature.CHUNKS, Feature.RETRACTION, Feature.SPECULATION}:
        rows *= 2  # or who came first is over, thanks to drafts, before the last come in
    if Feature.DYNAMIC in on:
        rows = 128  # chunks are sized by 64 rows at least
    prompt_len = 19 if Feature.CHUNKS in on or Feature.PREFIX in on else 5
    if Feature.DYNAMIC in on:
        prompt_len = 150
    arrivals = tuple(_arrivals(on, layout, prompt_len))
    pages_total = 20 * -(-prompt_len // PAGE_SIZE)
    if Feature.RETRACTION in on:
        # Room for what all are expected to need when they come in: 70% of what they may.
        pages_total = GROUP_REQUESTS * -(-(prompt_len + 7 * LONG_OUTPUT_LEN // 10) // PAGE_SIZE)
        if Feature.CHUNKS in on:  # those who came first have had some of it when the last come
            pages_total += 3
            if Feature.SPECULATION in on:  # and all but the last have a page more for their drafts
                pages_total += GROUP_REQUESTS - 1 + 3 * (Feature.DYNAMIC in on)
        if Feature.PREFIX in on:
            pages_total -= (GROUP_REQUESTS - 1) * SHARED_PAGES
    return Setup(
        layout=layout,
        shape=Shape(layers=2, experts=layout.ep * layout.moe_dp > 1),
        page_size=PAGE_SIZE,
        pages_total=pages_total,
        schedule=Schedule(
            step_tokens=rows * layout.dp,
            running_max=64,
            prefix_cache=Feature.PREFIX in on,
            overlap=int(Feature.OVERLAP in on),
            dynamic_chunks=Feature.DYNAMIC in on,
        ),
        spec=spec_of(on),
        arrivals=arrivals,
    )


def _arrivals(on: frozenset[Feature], layout: Layout, prompt_len: int) -> list[Arrival]:
    n_requests = layout.dp * (GROUP_REQUESTS if on & CROWDED else 2)
    made = [_arrival(on, seq, 0.0, prompt_len) for seq in range(n_requests)]
    if Feature.PREFIX in on:
        made += [_arrival(on, n_requests + at, LATER_MS, prompt_len) for at in range(2)]
    return made


def _arrival(on: frozenset[Feature], seq: int, at_ms: float, prompt_len: int) -> Arrival:
    shared = [3 * at % 32 for at in range(SHARED_PAGES * PAGE_SIZE)]
    own = [(7 * seq + at * at) % 32 for at in range(prompt_len)]
    tokens = (*shared, *own)[:prompt_len] if Feature.PREFIX in on else own
    wants = 2 if Feature.LOGPROBS in on else -1
    sampling = Sampling(
        seed=seq + 1,
        temperature=1.0 if Feature.SEED in on else 0.0,
        logprobs=wants,
        # All prompt rows are computed then: a prefix would never be hit.
        prompt_logprobs=wants if Feature.PREFIX not in on else -1,
        grammar=Grammar(RULE_KIND, str(seq)) if Feature.STRUCTURED in on else None,
    )
    output_len = LONG_OUTPUT_LEN if Feature.RETRACTION in on else OUTPUT_LEN
    return Arrival(at_ms, (Request(seq, tuple(tokens), output_len, sampling),))


def config_of(setup: Setup) -> Config:
    return Config(
        layout=setup.layout,
        schedule=setup.schedule,
        cache=Cache(page_size=setup.page_size),
        spec=setup.spec,
    )


def chunked(world: World, outcome: Outcome) -> bool:
    """Rows of a request that leave some of its prompt for later."""
    return any(
        rows.seq >= 0 and not rows.sample
        for plan in world.laws.plans
        for batch in plan.batches
        for rows in batch.rows
    )


def measured(world: World, outcome: Outcome) -> bool:
    """Steps that only measure came first, and later a prompt was cut."""
    return chunked(world, outcome) and any(
        rows.seq < 0 for plan in world.laws.plans for rows in plan.batches[0].rows
    )


def overlapped(world: World, outcome: Outcome) -> bool:
    """A plan before the reports of all that one a stage would allow."""
    return world.n_in_flight_max > world.setup.layout.pp


# What shows, after a run, that a feature was not only asked for.
SIGNS: dict[Feature, Callable[[World, Outcome], bool]] = {
    Feature.CHUNKS: chunked,
    Feature.DYNAMIC: measured,
    Feature.PREFIX: lambda world, outcome: outcome.hit_tokens > 0,
    Feature.RETRACTION: lambda world, outcome: outcome.retractions > 0,
    Feature.OVERLAP: overlapped,
    Feature.SPECULATION: lambda world, outcome: outcome.accepted > 0,
}
