"""Runs every measurement and writes bench/RESULTS.md: `python -m bench.report`, best left alone.

`--only peers` (or streaming, plan, kernels) renews one part and leaves the others as they stand.
`--merge FILE` takes the peers' part from a record of `bench.peers` and measures what it lacks.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from datetime import date

import torch

from bench import loads, machine, peers, streaming, tables

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
TITLE = "# What was measured\n\nWritten by `python -m bench.report`; each part names its machine.\n"


def peer_part(given: argparse.Namespace) -> str:
    """Decode, prefill, first token and memory beside other engines, and the bars."""
    asked = ["--rounds", str(given.rounds), "--weights", given.weights]
    asked += ["--merge", str(given.merge)] if given.merge else []
    found, rows = peers.main(peers.parser().parse_args(asked))
    told = [*asked[:-1], given.merge.name] if given.merge else asked  # not where it lies here
    about = found["about"]
    return (
        f"`python -m bench.peers {' '.join(told)}`: {about['model']}, {about['threads']} threads, "
        f"medians of {given.rounds} interleaved rounds, one engine computing at a time. Decode: N "
        f"streams, {loads.PROMPT_LEN} tokens in and {loads.OUTPUT_LEN} out, from the first request "
        "to the last token; a prefill is a request for one token; the first token is that of a "
        f"prompt of {loads.PROMPT_LEN} on an idle engine; memory is that of all its processes "
        "after the decode row of most streams, each page of a mapped file once. aserve, llama.cpp "
        "and vLLM over HTTP, OpenVINO and transformers in process. In brackets: the variant that "
        "was best in the row, and least to most over the median.\n\n"
        f"{tables.whole(found, rows)}"
    )


def streaming_part(given: argparse.Namespace) -> str:
    return streaming.text(streaming.measure(given.rounds)) + "\n"


def plan_part(_given: argparse.Namespace) -> str:
    return command("plan")


def kernels_part(_given: argparse.Namespace) -> str:
    return command("kernels")


def layouts_part(given: argparse.Namespace) -> str:
    return markdown("layouts", "--live", "thread", "process", "--rounds", str(given.rounds))


def spec_part(given: argparse.Namespace) -> str:
    return markdown("spec", "--rounds", str(given.rounds))


def pipeline_part(given: argparse.Namespace) -> str:
    return markdown("pipeline", "--rounds", str(given.rounds))


def markdown(*arguments: str) -> str:
    """What a measurement that speaks Markdown says."""
    command = [sys.executable, "-m", "aserve", "bench", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def command(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aserve", "bench", name], check=True, capture_output=True, text=True
    )
    return f"```\n{done.stdout.rstrip()}\n```\n"


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], str]]] = {
    "peers": ("Beside other engines", peer_part),
    "streaming": ("HTTP streaming", streaming_part),
    "plan": ("A step beside the model (`aserve bench plan`)", plan_part),
    "layouts": ("Layouts of ranks (`aserve bench layouts`)", layouts_part),
    "pipeline": ("Stages that wait (`aserve bench pipeline`)", pipeline_part),
    "spec": ("Drafts (`aserve bench spec`)", spec_part),
    "kernels": ("Kernels against their floors (`aserve bench kernels`)", kernels_part),
}


def main(given: argparse.Namespace) -> None:
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    pieces = [TITLE]
    for name, (title, make) in PARTS.items():
        if name in given.only:
            peers.say(f"measuring: {title}")
            where = f"{machine.line()}, torch {torch.__version__}, {date.today().isoformat()}"
            pieces.append(f"## {title}\n\n{where}\n\n{make(given)}")
        elif kept := part_of(old, title):
            pieces.append(kept)
    RESULTS.write_text("\n".join(pieces), encoding="utf-8")
    peers.say(json.dumps({"written": str(RESULTS)}))


def part_of(text: str, title: str) -> str:
    """The part under that heading, up to the next."""
    _, found, rest = text.partition(f"## {title}\n")
    return found + rest.split("\n## ")[0].rstrip() + "\n" if found else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m bench.report", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--weights", default="", help="of aserve in the peers' part: keep,bf16")
    parser.add_argument("--merge", type=pathlib.Path, help="a record of bench.peers")
    main(parser.parse_args())
