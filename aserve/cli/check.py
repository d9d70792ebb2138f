"""`aserve check`: whether a configuration would be accepted, by itself and, if the model is on this
machine, by the model; all findings, and exit 2 if not."""

import json
import sys
from collections.abc import Sequence

from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import REFUSED, say
from aserve.core.config import Config, Model
from aserve.core.layout import Grid
from aserve.errors import ConfigError

UNSEEN = "a model is not on this machine: whether it can be split or draft so is not known yet"


def run(given: Sequence[str]) -> int:
    parser = CommandParser(
        "check", "Say whether a configuration would be accepted.", usage="--config FILE [flags]"
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON on stdout")
    add_model_flags(parser)
    arguments = parser.parse_args(given)
    findings: tuple[str, ...] | None
    try:
        findings = with_model(config_of(arguments))
    except ConfigError as error:
        findings = error.findings
    notes, findings = ([UNSEEN] if findings is None else []), findings or ()
    if arguments.json:
        answer = {"accepted": not findings, "findings": findings, "notes": notes}
        sys.stdout.write(json.dumps(answer) + "\n")
        return REFUSED if findings else 0
    for line in (*findings, *notes):
        say(line)
    if not findings:
        sys.stdout.write(f"{arguments.config or 'this configuration'} is accepted\n")
    return REFUSED if findings else 0


def with_model(config: Config) -> tuple[str, ...] | None:
    """What the models have against it; None if one is not here. The default model on one rank
    without drafts needs no look, which would bring torch."""
    is_plain = Grid(config.layout).world == 1 and config.spec.method == "none"
    if config.model == Model() and is_plain:
        return ()
    from aserve.actors.loading import check_model

    return check_model(config)
