"""`aserve check`: whether a configuration would be accepted; all findings, and exit 2 if not."""

import json
import sys
from collections.abc import Sequence

from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import REFUSED, say
from aserve.errors import ConfigError


def run(given: Sequence[str]) -> int:
    parser = CommandParser(
        "check", "Say whether a configuration would be accepted.", usage="--config FILE [flags]"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON on stdout")
    add_model_flags(parser)
    arguments = parser.parse_args(given)
    findings: tuple[str, ...] = ()
    try:
        config_of(arguments)
    except ConfigError as error:
        findings = error.findings
    if arguments.json:
        sys.stdout.write(json.dumps({"accepted": not findings, "findings": findings}) + "\n")
    else:
        for finding in findings:
            say(finding)
    what = arguments.config or "this configuration"
    if not findings and not arguments.json:
        sys.stdout.write(f"{what} is accepted\n")
    return REFUSED if findings else 0
