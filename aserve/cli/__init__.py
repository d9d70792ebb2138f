"""The command `aserve`: a table of subcommands, each a module imported when it is asked for.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 it failed while running,
2 what was asked for cannot be (flags, configuration, model or request), 130 interrupted. `serve`
ends with 130 (SIGINT) or 143 (SIGTERM) if the signal came before it was ready, else it drains and
ends with 0.
"""

import gc
import importlib
import sys
from collections.abc import Sequence

from aserve import __version__
from aserve.cli.outcome import end_on_signals, exit_code, open_missing_streams

COMMANDS = {
    "serve": "serve a model over HTTP, as OpenAI's API",
    "generate": "continue a prompt or answer a message, offline",
    "chat": "hold a conversation in the terminal",
    "train-draft": "make a draft head for a model, for speculative decoding",
    "bench": "measure a server, the kernels or the planner",
    "features": "print which features stack",
    "doctor": "say what every rank of a running server is at",
    "sim": "run seeded simulations of whole deployments, with faults",
    "check": "say whether a configuration would be accepted",
}

USAGE = "usage: aserve [-h] [--version] COMMAND ...\n"


def help_text() -> str:
    rows = "".join(f"  {name:11} {what}\n" for name, what in COMMANDS.items())
    return (
        f"{USAGE}\nServe large language models.\n\ncommands:\n{rows}\n"
        "`aserve COMMAND --help` tells more. In a hurry: `aserve serve`, or `aserve chat`.\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name); the exit code."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help", "help"):
        return exit_code(lambda: _show(help_text()))
    if name == "--version":
        return exit_code(lambda: _show(f"aserve {__version__}\n"))
    if name not in COMMANDS:
        what = f"{name!r} is not a command" if name else "a command is missing"
        known = ", ".join(COMMANDS)
        sys.stderr.write(f"{USAGE}aserve: {what}; there are {known}\n")
        return 2

    def run() -> int:
        module = importlib.import_module(f"aserve.cli.{name.replace('-', '_')}")
        code: int = module.run(list(arguments[1:]))
        return code

    return exit_code(run)


def _show(text: str) -> int:
    sys.stdout.write(text)
    return 0


def entry() -> None:
    """The console script."""
    open_missing_streams()
    if sys.argv[1:2] == ["serve"]:
        end_on_signals()
    code = main(sys.argv[1:])
    # The interpreter's last collection goes through all of torch, for a second, to free what the
    # end of the process frees anyway.
    gc.freeze()
    sys.exit(code)
