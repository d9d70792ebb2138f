"""`aserve bench serve|kernels|plan|layouts|pipeline|quality|spec`: finds the one and runs it."""

import argparse
import importlib
import sys
from collections.abc import Sequence

from aserve.cli.outcome import REFUSED, UsageError

MEASUREMENTS = {
    "serve": "drive an OpenAI-compatible server",
    "kernels": "each native operation against its floor on this machine",
    "plan": "the planner's cost per step",
    "layouts": "each layout of ranks beside one rank",
    "pipeline": "how long stages wait, with fixed and with dynamic chunks",
    "quality": "what --weights costs: the perplexity of a text with each type",
    "spec": "tokens a step and a second, with drafts and without",
}


def run(given: Sequence[str]) -> int:
    name = given[0] if given else ""
    if name not in MEASUREMENTS:
        rows = "".join(f"  {name:10} {what}\n" for name, what in MEASUREMENTS.items())
        text = f"usage: aserve bench MEASUREMENT ...\n\nmeasurements:\n{rows}"
        wanted = name in ("-h", "--help")
        (sys.stdout if wanted else sys.stderr).write(text)
        return 0 if wanted else REFUSED
    module = importlib.import_module(f"aserve.bench.{name}")
    parser = argparse.ArgumentParser(f"aserve bench {name}", description=module.__doc__)
    module.add_arguments(parser)
    try:
        code: int = module.run(parser.parse_args(given[1:]))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return code
