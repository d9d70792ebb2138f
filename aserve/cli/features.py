"""`aserve features`: the matrix of what works and what stacks, for people or as JSON."""

import json
import sys
from collections.abc import Sequence

import msgspec

from aserve.cli.flags import CommandParser
from aserve.core.features import matrix, rows


def run(given: Sequence[str]) -> int:
    parser = CommandParser(
        "features", "Print which features work and which stack.", usage="[--json]"
    )
    parser.add_argument("--json", action="store_true", help="as JSON on stdout")
    if parser.parse_args(given).json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(rows()), indent=2) + "\n")
    else:
        sys.stdout.write(matrix())
    return 0
