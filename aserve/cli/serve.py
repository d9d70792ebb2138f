"""`aserve serve`: an OpenAI-compatible server; a line on stderr says when and where it is ready."""

import gc
import signal
from collections.abc import Sequence

from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import say
from aserve.cli.progress import Progress, Stopwatch

ALIASES = {
    "server.host": ("--host", "ADDRESS"),
    "server.port": ("--port", "PORT"),
    "server.api_key": ("--api-key", "KEY"),
}


def parser() -> CommandParser:
    made = CommandParser(
        "serve", "Serve a model over HTTP, as OpenAI's API.", usage="[MODEL] [flags]"
    )
    add_model_flags(made, ALIASES)
    return made


def run(given: Sequence[str]) -> int:
    arguments = parser().parse_args(given)
    config = config_of(arguments)
    clock = Stopwatch()
    # Imported late: they bring torch, which --help and refusals need not wait for.
    import trio

    from aserve.actors.loading import name_of
    from aserve.api.server import serve

    with Progress() as progress:

        def ready(url: str) -> None:
            progress.close()
            # What is there now stays: the collector need not go through all of torch again and
            # again, which holds up every stream for a tenth of a second each time.
            gc.freeze()
            name = config.model.name or name_of(config.model.path)
            say(f"serving {name} at {url} (ready in {clock})")

        async def main() -> signal.Signals | None:
            return await serve(config, ready=ready, progress=progress)

        ended_by = trio.run(main)
    if ended_by is None:
        return 0
    say(f"ended by {ended_by.name}")
    return 128 + ended_by
