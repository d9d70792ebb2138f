"""`aserve serve`: an OpenAI-compatible server; a line on stderr says when and where it is ready."""

import gc
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aserve.cli.flags import CommandParser, add_model_flags, config_of
from aserve.cli.outcome import say
from aserve.cli.progress import Progress, Stopwatch
from aserve.core.config import Config

if TYPE_CHECKING:
    import trio

LEAVE_S = 5.0  # beyond the time that rank 0 has to drain
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

    from aserve.actors.arena import share_arena
    from aserve.actors.loading import name_of
    from aserve.api.server import serve

    share_arena()
    if config.ranks.live == "cluster":
        from aserve.actors.cluster import follows

        if follows(config):
            return follow(config)
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


def follow(config: Config) -> int:
    """A process of a cluster that is not rank 0: it serves no HTTP, it obeys.

    Once it does, SIGTERM lets requests end that rank 0 is draining; a second ends it at once, as
    does the first before, while it loads or looks for rank 0.
    """
    import trio

    from aserve.actors import cluster
    from aserve.api.log import start_log

    start_log(config.server)
    leaving = _Leaving(config.server.drain_s + LEAVE_S)

    async def main() -> None:
        leaving.everything = trio.CancelScope()
        with leaving.everything, Progress() as progress:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(leaving.watch_signals)
                await cluster.follow(config, progress, leaving.now)
                nursery.cancel_scope.cancel()

    trio.run(main)
    if leaving.ended_by is None:
        return 0
    say(f"ended by {leaving.ended_by.name}")
    return 128 + leaving.ended_by


class _Leaving:
    """What a signal does to a rank that follows; `serves` as `cluster.follow` tells."""

    def __init__(self, limit_s: float) -> None:
        self.everything: trio.CancelScope
        self.serves = False
        self.ended_by: signal.Signals | None = None  # before requests could end
        self._limit_s = limit_s
        self._asked = False

    def now(self, serves: bool) -> None:
        self.serves = serves

    async def watch_signals(self) -> None:
        import trio

        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for number in signals:
                if self.serves and not self._asked:
                    self.everything.deadline = trio.current_time() + self._limit_s
                else:
                    self.ended_by = None if self._asked else signal.Signals(number)
                    self.everything.cancel()
                self._asked = True
