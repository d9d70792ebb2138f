"""What ranks in processes must agree on, and which plane carries what between them."""

import msgspec
import pytest

from aserve.actors.muster import check_alike, operators
from aserve.actors.placement import live_of, threads_each
from aserve.actors.wiring import FAREWELL, HIDDEN, HOST, LAYER, STORE, address_of, wires
from aserve.core.config import Config, Layout, Ranks
from aserve.core.message import Ready, Setup
from aserve.errors import ConfigError, PeerError, RankDied


def ready(rank: int, host: str = "a", **more: str) -> Ready:
    addresses = [(HOST, host), *more.items()]
    return Ready(rank, 100, "a llama", 2, "{}", tuple(addresses))


def test_ranks_that_are_alike_pass_and_others_are_named() -> None:
    check_alike((ready(0), ready(1)))
    other = msgspec.structs.replace(ready(1), model="a camel")
    with pytest.raises(PeerError, match="rank 1: has another model: a camel, rank 0 a llama"):
        check_alike((ready(0), other))
    other = msgspec.structs.replace(ready(2), config_digest="{1}")
    with pytest.raises(PeerError, match="rank 2: has another configuration"):
        check_alike((ready(0), ready(1), other))


def test_a_ranks_configuration_error_is_the_operators() -> None:
    found = operators(RankDied(1, "ConfigError: too few pages: 1"))
    assert isinstance(found, ConfigError)
    assert str(found) == "too few pages: 1"
    died = RankDied(1, "MemoryError: none left")
    assert operators(died) is died


def test_stages_on_one_host_share_memory_and_others_do_not() -> None:
    config = Config(layout=Layout(tp=2, pp=2))
    readies = [
        ready(0, "a", store="s 1"),
        ready(1, "a"),
        ready(2, "b", hidden="unix:/x"),
        ready(3, "c"),
    ]
    setup = Setup(addresses=wires(config, readies, "run"))
    assert [address_of(setup, LAYER, rank) for rank in range(4)] == [
        "shared_memory:aserve-run",
        "shared_memory:aserve-run",
        "torch:",
        "torch:",
    ]
    assert address_of(setup, STORE, 0) == "s 1"
    assert address_of(setup, HIDDEN, 2) == "unix:/x"
    assert address_of(setup, HIDDEN, 1) is None
    asked = msgspec.structs.replace(config, ranks=Ranks(layer_plane="torch"))
    assert address_of(Setup(addresses=wires(asked, readies, "run")), LAYER, 0) == "torch:"
    asked = msgspec.structs.replace(config, ranks=Ranks(layer_plane="shared_memory"))
    with pytest.raises(ConfigError, match="a stage lives on b, c"):
        wires(asked, readies, "run")


def test_a_farewell_is_no_setup_of_a_start() -> None:
    assert FAREWELL not in (Setup(), Setup(pages_total=1), Setup(config=b"{}"))


@pytest.mark.parametrize(
    ("layout", "live"),
    [
        (Layout(), "thread"),
        (Layout(tp=4), "thread"),
        (Layout(tp=5), "process"),
        (Layout(pp=2, tp=3), "process"),
    ],
)
def test_ranks_live_in_threads_while_they_are_few(layout: Layout, live: str) -> None:
    assert live_of(Config(layout=layout)) == live
    assert live_of(Config(layout=layout, ranks=Ranks(live="inline"))) == "inline"


@pytest.mark.parametrize(
    ("threads", "n_ranks", "each"),
    [(8, 2, (4, 4)), (8, 3, (3, 3, 2)), (2, 3, (1, 1, 1)), (1, 1, (1,))],
)
def test_threads_are_divided_and_nobody_has_none(
    threads: int, n_ranks: int, each: tuple[int, ...]
) -> None:
    assert threads_each(threads, n_ranks) == each
