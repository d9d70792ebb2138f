"""What a load test saw, request by request, and its summary as numbers, table and JSON."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence

QUANTILES = (50, 90, 99)


@dataclasses.dataclass
class Seen:
    """One request as its client saw it; times in seconds on one monotonic clock."""

    sent_s: float
    chunks_s: list[float] = dataclasses.field(default_factory=list)
    ended_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    target_steps: int = 0  # in which the model drew the output; 0: not told
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.completion_tokens < 2:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.chunks_s)]


def quantile(values: Sequence[float], percent: float) -> float:
    """Of sorted values, linear between neighbours."""
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def spread_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """Mean and quantiles in milliseconds; None of nothing."""
    if not values_s:
        return None
    ordered = sorted(values_s)
    spread = {"mean": sum(ordered) / len(ordered)}
    spread |= {f"p{percent}": quantile(ordered, percent) for percent in QUANTILES}
    return {name: round(value * 1e3, 3) for name, value in spread.items()}


def summarize(seen: Sequence[Seen]) -> dict[str, object]:
    """Totals over the time from the first request sent to the last ended; latencies of the good."""
    good = [one for one in seen if one.error is None]
    failures = Counter(one.error for one in seen if one.error is not None)
    duration_s = max(one.ended_s for one in seen) - min(one.sent_s for one in seen)
    prompt_tokens = sum(one.prompt_tokens for one in good)
    completion_tokens = sum(one.completion_tokens for one in good)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    busy_s = sum(one.ended_s - one.sent_s for one in seen)
    return {
        "requests": len(seen),
        "failures": len(seen) - len(good),
        "failure_reasons": dict(failures.most_common()),
        "duration_s": round(duration_s, 4),
        "concurrency_mean": round(busy_s * per_s, 2),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(one.cached_tokens for one in good),
        "completion_tokens": completion_tokens,
        "accepted_len_mean": accepted_len_mean(good),
        "requests_per_s": round(len(good) * per_s, 3),
        "output_tokens_per_s": round(completion_tokens * per_s, 2),
        "total_tokens_per_s": round((prompt_tokens + completion_tokens) * per_s, 2),
        "ttft_ms": spread_ms([one.ttft_s for one in good]),
        "tpot_ms": spread_ms([tpot for one in good if (tpot := one.tpot_s) is not None]),
        "itl_ms": spread_ms([gap for one in good for gap in one.gaps_s]),
        "e2e_ms": spread_ms([one.ended_s - one.sent_s for one in good]),
    }


def accepted_len_mean(good: Sequence[Seen]) -> float | None:
    """Output tokens a step of the model: 1 without speculative decoding, else with the token that
    comes with every draft. The first of each output came with its prompt and is left out."""
    told = [one for one in good if one.target_steps > 1]
    steps = sum(one.target_steps - 1 for one in told)
    return round(sum(one.completion_tokens - 1 for one in told) / steps, 3) if steps else None


LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "between chunks",
    "e2e_ms": "end to end",
}


def table(summary: dict[str, object]) -> str:
    """The summary for a person, as plain lines."""
    lines = [
        "{requests} requests, {failures} failed, in {duration_s:.2f} s "
        "({concurrency_mean:.1f} at once on average)".format(**summary),
        "{prompt_tokens} prompt tokens ({cached_tokens} from the cache), "
        "{completion_tokens} output tokens".format(**summary),
        "throughput: {requests_per_s:.2f} requests/s, {output_tokens_per_s:.1f} output tokens/s, "
        "{total_tokens_per_s:.1f} tokens/s in all".format(**summary),
        *_accepted(summary["accepted_len_mean"]),
        "",
        f"{'ms':24}" + "".join(f"{name:>12}" for name in ("mean", "p50", "p90", "p99")),
    ]
    for key, name in LATENCIES.items():
        spread = summary[key]
        cells = [f"{value:12.1f}" for value in spread.values()] if isinstance(spread, dict) else []
        lines.append(f"{name:24}" + ("".join(cells) or f"{'-':>12}"))
    reasons = summary["failure_reasons"]
    assert isinstance(reasons, dict)
    lines += [f"failed {count} times: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines)


def _accepted(length: object) -> list[str]:
    """A line where drafts were accepted."""
    if not isinstance(length, float) or length <= 1:
        return []
    return [f"accepted length: {length:.2f} tokens a step of the model, its own included"]
