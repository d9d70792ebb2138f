"""Which plane carries what between ranks in processes: decided once by the leader, obeyed by all.

Sums go through shared memory where a stage lives on one host, through torch.distributed elsewhere;
hidden states between stages through torch.distributed.
"""

from collections.abc import Sequence

from aserve.core.config import Config
from aserve.core.layout import Grid
from aserve.core.message import Ready, Setup
from aserve.errors import ConfigError

HOST, STORE, LAYER = "host", "store", "layer"  # planes of Ready.addresses and Setup.addresses
SHARED_MEMORY, TORCH, ALONE = "shared_memory:", "torch:", "alone:"

Addresses = tuple[tuple[str, int, str], ...]


def wires(config: Config, readies: Sequence[Ready], run: str) -> Addresses:
    """What every rank must know of all: how each stage sums, and where torch's store is.

    Raises ConfigError if `ranks.layer_plane` asks for what cannot be.
    """
    grid = Grid(config.layout)
    said = [dict(ready.addresses) for ready in readies]
    made: list[tuple[str, int, str]] = []
    for stage in range(grid.pp):
        ranks = range(stage * grid.tp, (stage + 1) * grid.tp)
        hosts = dict.fromkeys(said[rank][HOST] for rank in ranks)
        kind = layer_kind(config, list(hosts))
        name = f"{kind}aserve-{run}-{stage}" if kind == SHARED_MEMORY else kind
        made += [(LAYER, rank, name) for rank in ranks]
    made.append((STORE, 0, said[0][STORE]))
    return tuple(made)


def layer_kind(config: Config, hosts: Sequence[str]) -> str:
    """Of one stage, whose ranks live on `hosts`."""
    wanted = config.ranks.layer_plane
    if config.layout.tp == 1:
        return ALONE
    if wanted == "shared_memory" and len(hosts) > 1:
        raise ConfigError(
            f"ranks.layer_plane is shared_memory, but a stage lives on {', '.join(hosts)}: take "
            "auto, or place all ranks of a stage on one host"
        )
    return TORCH if wanted == "torch" or len(hosts) > 1 else SHARED_MEMORY


def address_of(setup: Setup, plane: str, rank: int) -> str:
    return next(text for name, of, text in setup.addresses if (name, of) == (plane, rank))
