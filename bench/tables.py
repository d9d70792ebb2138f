"""A comparison as Markdown: the figures, the bars, and how each engine was run."""

from collections.abc import Sequence
from typing import Any

from bench import record
from bench.loads import Row
from bench.record import Record

LABELS = {"decode": "decode, {} streams", "prefill": "prefill of {}", "ttft": "first token of {}"}


def label(row: Row) -> str:
    if row.kind == "rss":
        return "resident, MB"
    number = row.name.rpartition("_")[2]
    text = LABELS[row.kind].format(number)
    if row.name == "decode_1":
        text = "decode, 1 stream"
    return f"{text}, {row.unit}"


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def heading(cells: Sequence[str]) -> list[str]:
    return [line(cells), "|---" * len(cells) + "|"]


def figures(found: Record, rows: Sequence[Row]) -> str:
    """Medians; in brackets the variant a peer's figure is from, and its spread."""
    table = record.columns(found, rows)
    lines = heading(["", *table])
    for row in rows:
        cells = [_cell(found, row, column[row.name]) for column in table.values()]
        lines.append(line([label(row), *cells]))
    return "\n".join(lines) + "\n"


def _cell(found: Record, row: Row, best: record.Best | None) -> str:
    if best is None:
        return "-"
    samples = found["engines"][best.name]["samples"][row.name]
    option = best.name.partition(" ")[2]
    is_peer = found["engines"][best.name]["peer"] != record.OURS
    notes = [option] if option and is_peer else []
    if len(samples) > 1:
        notes.append(f"{record.spread(samples):.0%}")
    text = _number(best.value)
    return f"{text} ({', '.join(notes)})" if notes else text


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def bars(found: Record, rows: Sequence[Row]) -> str:
    """Each column of aserve over the best peer of the row."""
    names = {row.name: row for row in rows}
    lines = heading(["", "aserve", "best peer", "ratio", "bar", "goal", ""])
    for one in record.verdicts(found, rows):
        row = names[one.row]
        word = ("at least " if row.more_is_better else "at most ") + f"{one.bar.bar:g}x"
        verdict = "goal reached" if one.is_goal else "bar met" if one.is_met else "**missed**"
        own = f"{_number(one.value)} ({one.name})"
        best = f"{_number(one.peer.value)} ({one.peer.name})"
        goal = f"{one.bar.goal:g}x"
        lines.append(line([label(row), own, best, f"{one.ratio:.2f}x", word, goal, verdict]))
    return "\n".join(lines) + "\n"


def variants(found: Record, rows: Sequence[Row]) -> str:
    """Every variant's medians: what the best was taken from."""
    lines = heading(["", *(row.name for row in rows), "rounds", "idle cores"])
    for name, values in record.medians(found, rows).items():
        engine = found["engines"][name]
        if engine["failed"]:
            said = str(engine["failed"]).splitlines()[0][:160].replace("|", "/")
            lines.append(line([name, said, *[""] * (len(rows) + 1)]))
            continue
        numbers = ["-" if value is None else _number(value) for value in values.values()]
        rounds = max((len(one) for one in engine["samples"].values()), default=0)
        lines.append(line([name, *numbers, str(rounds), _idle(engine)]))
    return "\n".join(lines) + "\n"


def _idle(engine: dict[str, Any]) -> str:
    text = f"{engine.get('idle_cores', 0.0):.2f}"
    return f"{text}, paused between turns" if engine.get("is_paused") else text


def commands(found: Record) -> str:
    """Version and command of each variant that ran."""
    lines = []
    for name, engine in found["engines"].items():
        if engine.get("command"):
            lines.append(f"- {name}: {engine['version']}: `{' '.join(engine['command'])}`")
    return "\n".join(lines) + "\n"


def whole(found: Record, rows: Sequence[Row]) -> str:
    return "\n".join(
        [
            figures(found, rows),
            bars(found, rows),
            "Every variant:\n",
            variants(found, rows),
            commands(found),
        ]
    )
