"""What a comparison has measured, as data: kept in a file, merged, boiled down to one number a row.

No clock and no processes: the tests feed it hand-made samples.
"""

import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.loads import Row

Record = dict[str, Any]  # {"about": {...}, "engines": {variant: engine}}, as JSON has it
OURS = "aserve"
# A variant this much behind its peer's best in the first round is not measured there again: it
# cannot become the best, and rounds are long.
HOPELESS = 1.25


class RecordError(Exception):
    """The file does not go with the run."""


class Bar(NamedTuple):
    """aserve over the best peer: at least (where more is better), or at most."""

    bar: float
    goal: float


BARS = {
    "decode_1": Bar(1.3, 2.0),
    "decode_8": Bar(1.2, 2.0),
    "decode_32": Bar(1.2, 2.0),
    "prefill_512": Bar(1.1, 1.5),
    "prefill_2048": Bar(1.1, 1.5),
    "ttft_128": Bar(0.9, 0.6),
    "rss_mb": Bar(1.0, 0.5),
}


def new(about: Mapping[str, object]) -> Record:
    return {"about": dict(about), "engines": {}}


def load(path: pathlib.Path, about: Mapping[str, object]) -> Record:
    """The record in a file, or an empty one. RecordError if it measured something else."""
    if not path.exists():
        return new(about)
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
        before = {key: found["about"].get(key) for key in about}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path} is no record of bench.peers: {error!r}") from error
    if wrong := [key for key in about if before[key] != about[key]]:
        differ = "; ".join(f"{key} was {before[key]!r}, is {about[key]!r}" for key in wrong)
        raise RecordError(f"{path} does not go with this run: {differ}")
    return found


def save(path: pathlib.Path, record: Record) -> None:
    """In one move: a run that is cut short leaves the file of the last turn."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def open_engine(record: Record, name: str, peer: str, *, again: bool = False) -> dict[str, Any]:
    """The entry of a variant, with the samples it has; without them where measured `again`."""
    engines: dict[str, dict[str, Any]] = record["engines"]
    if again or name not in engines:
        engines[name] = {"peer": peer, "samples": {}, "failed": None}
    return engines[name]


def missing(record: Record, name: str, rows: Sequence[Row], rounds: int) -> list[Row]:
    """The rows of a variant that a run of so many rounds has still to measure."""
    samples = record["engines"][name]["samples"]
    lacking = [row for row in rows if len(samples.get(row.name, ())) < rounds]
    return [row for row in lacking if not is_hopeless(record, name, row)]


def is_hopeless(record: Record, name: str, row: Row) -> bool:
    """Whether another variant of the same peer was well ahead in the first round."""
    engines = record["engines"]
    own = engines[name]["samples"].get(row.name)
    if not own or engines[name]["peer"] == OURS:
        return False
    firsts = [
        one["samples"][row.name][0]
        for one in engines.values()
        if one["peer"] == engines[name]["peer"] and one["samples"].get(row.name)
    ]
    if row.more_is_better:
        return bool(max(firsts) > HOPELESS * own[0])
    return bool(own[0] > HOPELESS * min(firsts))


def medians(record: Record, rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """By variant and row."""
    found: dict[str, dict[str, float | None]] = {}
    # aserve first, whenever it was measured.
    for name, engine in sorted(record["engines"].items(), key=lambda one: one[1]["peer"] != OURS):
        samples = engine["samples"]
        found[name] = {
            row.name: round(statistics.median(samples[row.name]), 1)
            if samples.get(row.name)
            else None
            for row in rows
        }
    return found


class Best(NamedTuple):
    """A figure and the variant it is from."""

    value: float
    name: str


def columns(record: Record, rows: Sequence[Row]) -> dict[str, dict[str, Best | None]]:
    """One column for each variant of aserve, one for each peer: its best variant row by row."""
    found: dict[str, dict[str, Best | None]] = {}
    for name, values in medians(record, rows).items():
        peer = record["engines"][name]["peer"]
        column = found.setdefault(name if peer == OURS else peer, {})
        for row in rows:
            value, best = values[row.name], column.get(row.name)
            column.setdefault(row.name, None)
            if value is not None and (best is None or row.is_better(value, best.value)):
                column[row.name] = Best(value, name)
    return found


def summary(record: Record, rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """{name: {row: number}} for programs; null where nothing was measured, `error` says why."""
    found: dict[str, dict[str, object]] = {}
    for name, column in columns(record, rows).items():
        found[name] = {row: best.value if best else None for row, best in column.items()}
        of_it = [key for key, one in record["engines"].items() if name in (key, one["peer"])]
        failures = [record["engines"][key]["failed"] for key in of_it]
        if not any(column.values()) and any(failures):
            found[name]["error"] = next(filter(None, failures))
    return found


class Verdict(NamedTuple):
    """A column of aserve in one row, over the best peer there."""

    row: str
    name: str
    value: float
    peer: Best
    ratio: float
    bar: Bar
    is_met: bool
    is_goal: bool


def verdicts(record: Record, rows: Sequence[Row]) -> list[Verdict]:
    found = []
    table = columns(record, rows)
    peers = {one["peer"] for one in record["engines"].values()} - {OURS}
    for row in rows:
        theirs = [best for peer in sorted(peers) if (best := table[peer][row.name])]
        if not theirs or row.name not in BARS:
            continue
        pick = max if row.more_is_better else min
        best = pick(theirs, key=lambda one: one.value)
        bar = BARS[row.name]
        for name, column in table.items():
            own = column[row.name]
            if name in peers or own is None:
                continue
            ratio = own.value / best.value
            sign = 1 if row.more_is_better else -1
            met = sign * ratio >= sign * bar.bar
            goal = sign * ratio >= sign * bar.goal
            found.append(Verdict(row.name, name, own.value, best, ratio, bar, met, goal))
    return found


def spread(samples: Sequence[float]) -> float:
    """From least to most, as a share of the median."""
    return (max(samples) - min(samples)) / statistics.median(samples)
