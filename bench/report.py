"""Runs every measurement and writes bench/RESULTS.md: `python -m bench.report`, best left alone.

`--only peers` (or streaming, plan, kernels) renews one part and leaves the others as they stand.
"""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from datetime import date

import torch

from bench import machine, peers, streaming

RESULTS = pathlib.Path(__file__).parent / "RESULTS.md"
TITLE = "# What was measured\n\nWritten by `python -m bench.report`; each part names its machine.\n"


def peer_part(rounds: int) -> str:
    """Decode and prefill beside other engines, and memory."""
    found = peers.main(peers.parser().parse_args(["--rounds", str(rounds)]))
    memory = found["memory"]
    assert isinstance(memory, dict)
    lines = (
        f"SmolLM2-135M-Instruct, {found['threads']} threads, medians of {rounds} interleaved "
        "rounds. Decode: N streams, 128 tokens in and 128 out, from the first request to the last "
        "token. aserve and llama.cpp over HTTP, transformers in process; llama.cpp computes "
        "the 4-bit GGUF, the others its weights in bf16.\n\n"
        f"{peers.table(found)}\n"
        "Resident memory after that: {resident_mb} MB; weights {weights_mb}, KV pool {kv_pool_mb}, "
        "allowed {allowed_mb} (both and 600).\n".format(**memory)
    )
    return lines


def streaming_part(rounds: int) -> str:
    return streaming.text(streaming.measure(rounds)) + "\n"


def plan_part(_rounds: int) -> str:
    return command("plan")


def kernels_part(_rounds: int) -> str:
    return command("kernels")


def layouts_part(rounds: int) -> str:
    return markdown("layouts", "--live", "thread", "process", "--rounds", str(rounds))


def pipeline_part(rounds: int) -> str:
    return markdown("pipeline", "--rounds", str(rounds))


def markdown(*arguments: str) -> str:
    """What a measurement that speaks Markdown says."""
    command = [sys.executable, "-m", "aserve", "bench", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def command(name: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "aserve", "bench", name], check=True, capture_output=True, text=True
    )
    return f"```\n{done.stdout.rstrip()}\n```\n"


PARTS: dict[str, tuple[str, Callable[[int], str]]] = {
    "peers": ("Beside other engines", peer_part),
    "streaming": ("HTTP streaming", streaming_part),
    "plan": ("A step beside the model (`aserve bench plan`)", plan_part),
    "layouts": ("Layouts of ranks (`aserve bench layouts`)", layouts_part),
    "pipeline": ("Stages that wait (`aserve bench pipeline`)", pipeline_part),
    "kernels": ("Kernels against their floors (`aserve bench kernels`)", kernels_part),
}


def main(only: list[str], rounds: int) -> None:
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
    pieces = [TITLE]
    for name, (title, make) in PARTS.items():
        if name in only:
            peers.say(f"measuring: {title}")
            where = f"{machine.line()}, torch {torch.__version__}, {date.today().isoformat()}"
            pieces.append(f"## {title}\n\n{where}\n\n{make(rounds)}")
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
    given = parser.parse_args()
    main(given.only, given.rounds)
