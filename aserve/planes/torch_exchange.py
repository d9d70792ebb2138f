"""Bytes between the ranks of a group over torch.distributed, tensor by tensor to each peer.

gloo: tagged sends and receives, all at once. A tag is a digest of the call, so bytes never go where
another call was made or another size expected (there gloo ends the process, or fills in silence):
such ranks miss each other until the limit. Other backends (NCCL) have no tags: one all-to-all.
"""

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from aserve.errors import ConfigError
from aserve.planes import signature

NO_CALL = 0x7FFFFFFF  # a tag that no call has; others are below
WAKE = timedelta(milliseconds=1)


class Network(NamedTuple):
    """Where ranks find each other: a store all reach, and for gloo the address to listen on (None:
    what GLOO_SOCKET_IFNAME or this host's name says)."""

    store: Store
    host: str | None = None
    backend: str = "gloo"


class Exchange(Protocol):
    tagged: bool  # whether different calls cannot be taken for each other

    def move(
        self, members: Sequence[int], key: int, give: Sequence[Tensor], get: Sequence[Tensor]
    ) -> None:
        """Send `give[i]` to member i and fill `get[i]` with what it sends; contiguous tensors, the
        own place ignored. `key` digests what all members must agree on. Raises RuntimeError."""
        ...

    def wake(self) -> None:
        """Make every waiting `move` of this stage raise, here and at the peers, for good."""
        ...


def as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


class GlooExchange:
    """One group for the stage, its ranks counted from `first`."""

    tagged = True

    def __init__(self, network: Network, stage: range, rank: int, limit_s: float) -> None:
        self._first = stage[0]
        self._rank = rank
        self._limit_s = limit_s
        self._peers = [peer - stage[0] for peer in stage if peer != rank]
        place, n = rank - stage[0], len(stage)
        self._group = _gloo(network, PrefixStore("gloo", network.store), place, n, limit_s)

    def move(
        self, members: Sequence[int], key: int, give: Sequence[Tensor], get: Sequence[Tensor]
    ) -> None:
        works = []
        for member, received in zip(members, get, strict=True):
            if member != self._rank:
                tag = _tag(key, member, self._rank, received)
                flat = as_bytes(received)
                works.append(self._group.recv([flat], member - self._first, tag))
        for member, sent in zip(members, give, strict=True):
            if member != self._rank:
                tag = _tag(key, self._rank, member, sent)
                works.append(self._group.send([as_bytes(sent)], member - self._first, tag))
        until_s = time.monotonic() + self._limit_s
        for work in works:
            left_s = max(until_s - time.monotonic(), 0.001)
            work.wait(timedelta(seconds=left_s))

    def wake(self) -> None:
        # A wait that runs out closes every connection of the group, which wakes whoever waits on
        # one, at both ends; gloo's own abort does not. It takes one connection that is still open.
        nothing = torch.empty(1, dtype=torch.uint8)
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self._group.recv([nothing], peer, NO_CALL).wait(WAKE)


def _tag(key: int, sender: int, receiver: int, x: Tensor) -> int:
    n_bytes = x.numel() * x.element_size()
    return signature.fold(key, (sender, receiver, n_bytes)) % NO_CALL


class AllToAllExchange:
    """A communicator for each group that meets, made when it first does.

    Bytes travel on the backend's device, wherever the tensors are: NCCL moves nothing else.
    """

    tagged = False

    def __init__(self, network: Network, stage: range, rank: int, limit_s: float) -> None:
        self._network = network
        self._rank = rank
        self._limit_s = limit_s
        self._groups: dict[tuple[int, ...], Any] = {}
        self._device = torch.device("cuda" if network.backend == "nccl" else "cpu")

    def move(
        self, members: Sequence[int], key: int, give: Sequence[Tensor], get: Sequence[Tensor]
    ) -> None:
        place = members.index(self._rank)
        sent = [as_bytes(x).to(self._device) for x in give]
        sent[place] = sent[place][:0]
        sizes = [x.numel() * x.element_size() if at != place else 0 for at, x in enumerate(get)]
        received = sent[place].new_empty(sum(sizes))
        work = self._group(tuple(members)).alltoall_base(
            received, torch.cat(sent), sizes, [x.numel() for x in sent]
        )
        work.wait(timedelta(seconds=self._limit_s))
        for at, piece in enumerate(received.split_with_sizes(sizes)):
            if at != place:
                as_bytes(get[at]).copy_(piece)

    def _group(self, members: tuple[int, ...]) -> Any:
        if members not in self._groups:
            name = "-".join(map(str, members))
            store = PrefixStore(name, self._network.store)
            self._groups[members] = _communicator(
                self._network, store, members.index(self._rank), len(members), self._limit_s
            )
        return self._groups[members]

    def wake(self) -> None:
        for group in self._groups.values():
            group.abort()


# The classes that torch has where it was built with them.
BACKENDS = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL"}


def check_backend(backend: str) -> None:
    """Raises ConfigError for one that this torch lacks."""
    if not hasattr(dist, BACKENDS.get(backend, "")):
        raise ConfigError(f"this torch has no {backend!r} backend for collectives")


def _communicator(network: Network, store: Store, place: int, n: int, limit_s: float) -> Any:
    if network.backend == "gloo":
        return _gloo(network, store, place, n, limit_s)
    kind = getattr(dist, BACKENDS[network.backend])
    return kind(store, place, n, timedelta(seconds=limit_s))


def _gloo(network: Network, store: Store, place: int, n: int, limit_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    host = network.host
    device = gloo.create_device(hostname=host) if host else gloo.create_default_device()
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=limit_s)
    return gloo(store, place, n, options)
