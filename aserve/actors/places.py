"""From `ranks.live` to the place it names."""

from contextlib import AbstractAsyncContextManager

from aserve.actors.cluster import open_cluster
from aserve.actors.here import open_here
from aserve.actors.loading import Progress
from aserve.actors.placement import Placement, live_of
from aserve.actors.processes import open_processes
from aserve.core.config import Config


def open_placement(
    config: Config, progress: Progress | None
) -> AbstractAsyncContextManager[Placement]:
    """Load what outlives a restart of the ranks. Raises ModelError, ConfigError on entering."""
    live = live_of(config)
    if live == "process":
        return open_processes(config, progress)
    if live == "cluster":
        return open_cluster(config, progress)
    return open_here(config, progress, inline=live == "inline")
