"""`aserve doctor URL`: what every rank of a running server is at, also while one hangs."""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aserve.cli.flags import CommandParser
from aserve.cli.outcome import FAILED, say

ANSWER_S = 10.0


def run(given: Sequence[str]) -> int:
    """0: the ranks serve; 1: they do not, or the server did not answer."""
    parser = CommandParser(
        "doctor", "Say what every rank of a server is at.", usage="[URL] [--api-key KEY] [--json]"
    )
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s"
    )
    parser.add_argument("--api-key", metavar="KEY", help="the server's, if it has one")
    parser.add_argument("--json", action="store_true", help="the whole state as JSON on stdout")
    arguments = parser.parse_args(given)
    try:
        state = fetch(arguments.url, arguments.api_key)
    except (OSError, ValueError) as error:
        say(f"{arguments.url} did not say: {error}")
        return FAILED
    if arguments.json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in report(state)))
    return 0 if state["state"] == "serving" and not state["silent"] else FAILED


def fetch(url: str, api_key: str | None) -> dict[str, Any]:
    """Raises OSError, ValueError."""
    base = url if "://" in url else f"http://{url}"
    if not base.startswith(("http://", "https://")):
        raise ValueError("the address of a server starts with http:// or https://")
    request = urllib.request.Request(base.rstrip("/") + "/debug/state")
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            state = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(_reason(error)) from None
    if not isinstance(state, dict) or "ranks" not in state:
        raise ValueError("it answers, but not as aserve does")
    return state


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return f"{error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def report(state: Mapping[str, Any]) -> Iterator[str]:
    """For people: what is wrong first, then a line a rank, a step, and the planner's account."""
    sizes = [f"{key} {value}" for key, value in state["layout"].items() if value not in (1, None)]
    yield (
        f"{state['state']}; {len(state['ranks'])} ranks ({state['live']}), {', '.join(sizes)}; "
        f"restarts: {state['restarts']}"
    )
    if state["failure"]:
        yield f"failed for good: {state['failure']}"
    if state["last_break"]:
        yield f"last break: {state['last_break']}"
    if state["silent"]:
        yield f"did not answer: {_ranks(state['silent'])}"
    yield ""
    yield from table(
        ("rank", "place", "step", "reported", "digest", "seqs", "waited", "doing", "last call"),
        [_rank(rank) for rank in state["ranks"]],
    )
    yield ""
    if not state["steps"]:
        yield "no step is in flight"
    for step in state["steps"]:
        rows = "+".join(map(str, step["rows"]))
        yield (
            f"step {step['step']} (microbatch {step['microbatch']}, {rows} rows) is in flight for "
            f"{step['age_s']:.1f} s; missing: {_ranks(step['missing'])}"
        )
    yield from _drafts(state["spec"], state["planner"]["drafts"])
    yield ""
    yield from _tree("planner", state["planner"])


def _drafts(spec: Mapping[str, Any], drafts: Mapping[str, Any]) -> Iterator[str]:
    """A line where there is speculative decoding."""
    if spec["method"] == "none":
        return
    now = f"now {spec['tokens']} tokens in {spec['depth']} levels" if spec["tokens"] else "now none"
    mean = drafts["accepted"] / drafts["drafts"] if drafts["drafts"] else 0.0
    yield (
        f"drafts by {spec['method']}, {now}; {drafts['drafts']} so far, of which {mean:.2f} tokens "
        "each were accepted"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _rank(rank: Mapping[str, Any]) -> tuple[str, ...]:
    reported = "-" if rank["reported_step"] < 0 else str(rank["reported_step"])
    if not rank["answered"]:
        silent = ("-", "-", "-", "does not answer", "-")
        return (str(rank["rank"]), rank["place"], "-", reported, *silent)
    return (
        str(rank["rank"]),
        rank["place"],
        "-" if rank["step"] < 0 else str(rank["step"]),
        reported,
        rank["digest"],
        str(rank["sequences"]),
        f"{rank['waited_ms']:.1f} ms",
        rank["doing"],
        rank["last_call"] or "-",
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _tree(name: str, value: Any, indent: str = "") -> Iterator[str]:
    """Any JSON value as indented lines; lists of plain values stay on one."""
    nested = isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value)
    )
    if name == "digest" and isinstance(value, int):
        value = f"{value:08x}"  # as the ranks tell theirs
    if not nested:
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        yield f"{indent}{name}: {shown}"
        return
    yield f"{indent}{name}:"
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, part in pairs:
        yield from _tree(str(key), part, indent + "  ")
