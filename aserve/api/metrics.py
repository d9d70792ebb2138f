"""`/metrics`: the engine's statistics and the server's own counts, as Prometheus text.

Read when scraped; nothing is counted here. Names and units follow prometheus.io/docs/practices.
"""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from aserve.actors.metrics import EngineStatistics, HistogramData
from aserve.actors.supervision import State
from aserve.api.service import Service


class Metrics(Collector):
    """A handler and the collector behind it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    async def __call__(self, _request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("ready", "1 while requests are taken.", float(service.ready))
        yield _gauge("http_requests_running", "HTTP requests in progress.", len(service.calls))
        responses = CounterMetricFamily(
            "aserve_http_responses",
            "HTTP responses by route and status.",
            labels=("method", "route", "status"),
        )
        for (method, route, status), count in sorted(service.responses.items()):
            responses.add_metric((method, route, str(status)), count)
        yield responses
        if service.loaded:
            statistics = service.engine.statistics()
            yield from _ranks(statistics)
            yield from _engine(statistics)
            yield from drafts_told(statistics)


def _ranks(statistics: EngineStatistics) -> Iterator[Metric]:
    """The state is one series a state, of which one is 1, as Prometheus has enumerations."""
    states = GaugeMetricFamily("aserve_state", "State of the ranks.", labels=("state",))
    for state in State:
        states.add_metric((state,), float(statistics.state == state))
    yield states
    yield _counter("rank_restarts", "Restarts of the ranks.", statistics.restarts)
    steps = GaugeMetricFamily("aserve_rank_step", "Last step reported.", labels=("rank",))
    busy = CounterMetricFamily(
        "aserve_rank_busy_seconds", "Time a rank computed.", labels=("rank",)
    )
    waited = CounterMetricFamily(
        "aserve_rank_waited_seconds",
        "Time a rank waited for plans and for the stage before.",
        labels=("rank",),
    )
    for rank in statistics.ranks:
        steps.add_metric((str(rank.rank),), rank.step)
        busy.add_metric((str(rank.rank),), rank.busy_s)
        waited.add_metric((str(rank.rank),), rank.waited_s)
    yield from (steps, busy, waited)


def _engine(statistics: EngineStatistics) -> Iterator[Metric]:
    planner = statistics.planner
    total = planner.kv_pages_total
    yield _gauge("requests_running", "Sequences that hold KV pages.", planner.running)
    yield _gauge("requests_waiting", "Sequences in the queue.", planner.waiting)
    yield _gauge("kv_pages", "Pages of the KV pool.", total)
    yield _gauge("kv_pages_used", "Pages that sequences hold.", planner.kv_pages_used)
    yield _gauge("kv_pages_free", "Pages that hold nothing.", planner.kv_pages_free)
    yield _gauge("kv_pages_cached", "Pages of evictable prefixes.", planner.kv_pages_cached)
    used = planner.kv_pages_used / total if total else 0.0
    yield _gauge("kv_usage_ratio", "Share of the KV pool that sequences hold.", used)
    queried, hit = planner.prefix_query_tokens, planner.prefix_hit_tokens
    yield _counter("prefix_query_tokens", "Prompt tokens looked up in the cache.", queried)
    yield _counter("prefix_hit_tokens", "Prompt tokens found in the cache.", hit)
    rate = hit / queried if queried else 0.0
    yield _gauge("prefix_hit_ratio", "Share of looked-up tokens found, since the start.", rate)
    yield _counter("steps", "Steps computed.", planner.steps)
    yield _counter("rows", "Tokens computed, prefill and decode.", planner.rows)
    yield _counter("retractions", "Sequences that gave their pages back.", planner.retractions)
    yield _counter("requests", "Requests taken.", statistics.requests)
    yield _counter("prompt_tokens", "Prompt tokens of those requests.", statistics.prompt_tokens)
    yield _counter("cached_tokens", "Of those, from the cache.", statistics.cached_tokens)
    yield _counter("generation_tokens", "Tokens generated.", statistics.generation_tokens)
    finished = CounterMetricFamily(
        "aserve_choices_finished", "Choices ended, by reason.", labels=("reason",)
    )
    for reason, count in sorted(statistics.finished.items()):
        finished.add_metric((reason,), count)
    yield finished
    yield _histogram("time_to_first_token", "From submission.", statistics.ttft_s)
    yield _histogram("inter_token", "Between tokens of a choice.", statistics.inter_token_s)
    yield _histogram("request", "From submission to a choice's end.", statistics.e2e_s)
    yield _histogram("step", "One step of the ranks.", statistics.step_s)


def drafts_told(statistics: EngineStatistics) -> Iterator[Metric]:
    """All zero without speculative decoding, but for the steps."""
    drafts, drafting = statistics.planner.drafts, statistics.drafting
    steps = drafts.target_steps
    yield _counter("target_steps", "Draws of sequences, drafts accepted or not.", steps)
    yield _counter("spec_drafts", "Drafts verified, one a sequence and step.", drafts.drafts)
    yield _counter("spec_draft_tokens", "Tokens of those drafts.", drafts.drafted)
    yield _counter("spec_accepted_tokens", "Of those, in the text.", drafts.accepted)
    accepted_at = CounterMetricFamily(
        "aserve_spec_accepted_tokens_per_position",
        "Drafts whose token at this position, from 0, is in the text.",
        labels=("position",),
    )
    for position, count in enumerate(drafts.accepted_at):
        accepted_at.add_metric((str(position),), count)
    yield accepted_at
    lens = drafts.accepted_lens
    buckets = [(f"{length}.0", sum(lens[: length + 1])) for length in range(len(lens))]
    lengths = HistogramMetricFamily(
        "aserve_spec_accepted_length", "Tokens of a draft that are in the text."
    )
    lengths.add_metric((), [*buckets, ("+Inf", drafts.drafts)], sum_value=drafts.accepted)
    yield lengths
    yield _gauge("spec_depth", "Levels of the drafts that are asked for now.", drafting.depth)
    yield _gauge("spec_tokens", "Tokens of the drafts that are asked for now.", drafting.tokens)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"aserve_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"aserve_{name}", text, value=value)


def _histogram(name: str, text: str, data: HistogramData) -> Metric:
    """Prometheus counts cumulatively, up to an infinite bound."""
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip((*data.bounds, float("inf")), data.counts, strict=True):
        seen += count
        buckets.append(("+Inf" if bound == float("inf") else repr(bound), seen))
    family = HistogramMetricFamily(f"aserve_{name}_seconds", text)
    family.add_metric((), buckets, sum_value=data.sum)
    return family
