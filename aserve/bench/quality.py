"""`aserve bench quality`: what --weights costs: the perplexity of a text with each type of weights.

The text is prose of Python's own language reference, as `pydoc` carries it (PSF licence), so
nothing is fetched; numbers compare types of weights, not models. It runs through the engine as any
prompt would, in windows of its own.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Sequence

from aserve.actors.llm import LLM
from aserve.actors.loading import cores
from aserve.bench.plan import machine_line
from aserve.core.message import TokenLogprob
from aserve.core.request import SamplingParams
from aserve.models import fetch
from aserve.models.registry import CONVERSIONS, load_model
from aserve.tensor.ops import open_ops

BASE = "bf16"
TOPICS = ("execmodel", "import", "customization", "attribute-access", "try", "objects", "calls")
WINDOW_LEN = 1024
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)

Scored = list[tuple[float, int]]  # of each token: log p of it, and the token that came first


@dataclasses.dataclass(frozen=True)
class Row:
    """`ratio` of perplexities, and the standard error of its logarithm over tokens; `same_first` is
    the share of places where the favourite token is the same. All three beside bf16."""

    weights: str
    weight_bytes: int
    perplexity: float
    ratio: float | None
    ratio_error: float | None
    same_first: float | None


def text() -> str:
    """Some 70 kB of English about Python, the same in every release but for details."""
    import pydoc_data.topics as reference

    return "\n\n".join(reference.topics[name] for name in TOPICS)


def windows(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """The first `count` tokens in pieces of `length`. Raises ValueError if there are fewer."""
    if count > len(tokens):
        raise ValueError(f"--tokens is {count}, the text has {len(tokens)}")
    cut = [list(tokens[at : min(at + length, count)]) for at in range(0, count, length)]
    return [window for window in cut if len(window) > 1]


def scored(logprobs: Sequence[TokenLogprob | None]) -> Scored:
    """Of a window; its first token has no probability."""
    return [(one.logprob, one.top[0][0]) for one in logprobs if one is not None]


def measure(path: str, weights: str, count: int) -> tuple[int, Scored]:
    """(bytes of the weights, every scored token) through an engine of this type."""
    # The engine does not say what its weights weigh; the same loader does.
    kept = {"weights": weights}
    n_bytes = load_model(path, ops=open_ops("native", cores()), **kept).nbytes  # type: ignore[arg-type]
    settings = {"schedule__prefix_cache": False, "cache__kv_tokens": 4 * WINDOW_LEN}
    with LLM(path, model__weights=weights, **settings) as llm:
        length = min(WINDOW_LEN, llm.engine.context_len - 1)
        found: Scored = []
        for done in llm.generate(list(windows(llm.tokenize(text()), count, length)), SCORED):
            if done.error is not None or done.prompt_logprobs is None:
                raise RuntimeError(f"a window came back without logprobs: {done.error}")
            found += scored(done.prompt_logprobs)
    return n_bytes, found


def row_of(weights: str, n_bytes: int, found: Scored, base: Scored | None) -> Row:
    perplexity = math.exp(-statistics.fmean(logprob for logprob, _ in found))
    if base is None:
        return Row(weights, n_bytes, perplexity, None, None, None)
    lost = [theirs[0] - ours[0] for ours, theirs in zip(found, base, strict=True)]
    same = [ours[1] == theirs[1] for ours, theirs in zip(found, base, strict=True)]
    error = statistics.pstdev(lost) / math.sqrt(len(lost))
    ratio = math.exp(statistics.fmean(lost))
    return Row(weights, n_bytes, perplexity, ratio, error, statistics.fmean(same))


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| --weights | MB in memory | perplexity | of bf16's | same first choice |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ratio, same = "-", "-"
        if row.ratio is not None and row.ratio_error is not None and row.same_first is not None:
            ratio = f"{row.ratio:.4f} +- {row.ratio * row.ratio_error:.4f}"
            same = f"{row.same_first:.1%}"
        size = f"{row.weight_bytes / 1e6:.0f}"
        lines.append(f"| {row.weights} | {size} | {row.perplexity:.3f} | {ratio} | {same} |")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--weights",
        default=",".join(CONVERSIONS),
        metavar="TYPE,...",
        help=f"of {', '.join(CONVERSIONS)}; all of them if left out",
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the text")
    parser.add_argument("--json", action="store_true", help="rows as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    asked = list(dict.fromkeys(options.weights.split(",")))
    if unknown := [name for name in asked if name not in CONVERSIONS]:
        known = ", ".join(CONVERSIONS)
        raise ValueError(f"--weights {unknown[0]!r} is unknown: use some of {known}")
    if options.tokens < 2:
        raise ValueError("--tokens is at least 2")
    path = str(fetch.resolve(options.model))
    found = {}
    for weights in asked:
        if not options.json:
            print(f"{weights} ...", file=sys.stderr)
        found[weights] = measure(path, weights, options.tokens)
    base = found[BASE][1] if BASE in found else None
    rows = [row_of(weights, n_bytes, own, base) for weights, (n_bytes, own) in found.items()]
    if options.json:
        print(
            json.dumps(
                {
                    "machine": machine_line(),
                    "model": options.model,
                    "tokens": options.tokens,
                    "rows": [dataclasses.asdict(row) for row in rows],
                }
            )
        )
        return 0
    print(f"{options.model}, {options.tokens} tokens of Python's language reference\n")
    print(table(rows))
    print(f"\n{machine_line()}")
    return 0
