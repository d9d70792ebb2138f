"""The hidden plane between processes over torch.distributed: a gloo group of two a pair of ranks.

Each direction has a thread of its own, since gloo's calls block. A fixed header goes first and is
compared before a tensor is received: gloo ends the process where a buffer is too small. A call of
gloo cannot be interrupted, so a thread that waits for a lost peer is left behind; it ends by itself
within the limit, and the process with it.
"""

import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import trio
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from aserve.errors import PlaneError, PlaneTimeout
from aserve.planes.hidden_bundle import (
    HEADER,
    Header,
    Neighbours,
    Shapes,
    Waits,
    allocated,
    described,
    died,
    n_bytes,
    shapes_of,
)

# A ProcessGroupGloo, whose stubs know neither send nor recv.
Group: TypeAlias = Any
# gloo's own limit is a little longer than ours, which says more.
MARGIN_S = 1.0
SENDER, RECEIVER = 0, 1  # in a group of two


class TorchEnd:
    """A HiddenEnd over torch.distributed; made by `open_torch_hidden`."""

    def __init__(
        self,
        beside: Neighbours,
        previous: Group | None,
        following: Group | None,
        waits: Waits,
        in_flight_max: int,
    ) -> None:
        self.has_previous = previous is not None
        self.has_next = following is not None
        self._beside = beside
        self._previous = previous
        self._next = following
        self._waits = waits
        self._reader = _Thread(f"aserve-hidden-in-{beside.rank}") if previous else None
        self._writer = _Thread(f"aserve-hidden-out-{beside.rank}") if following else None
        self._fetch: _Fetch | None = None
        self._in_flight_max = in_flight_max
        self._room = trio.Semaphore(in_flight_max, max_value=in_flight_max)

    async def receive(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        assert self._reader is not None, "a first stage receives nothing"
        assert self._previous is not None
        self._waits.check()
        if n_bytes(shapes) == 0:
            await trio.lowlevel.checkpoint()
            return allocated(shapes)
        if self._fetch is None:
            self._fetch = _Fetch(step, shapes)
            job = partial(_receive, self._previous, self._fetch)
            self._reader.submit(job, partial(self._fetched, self._fetch))
        fetch = self._fetch
        late = partial(self._beside.late_sender, step, self._waits.limit_s)
        await self._waits.wait(fetch.done.wait, late)
        self._waits.check()
        self._fetch = None
        if fetch.step != step or described(fetch.shapes) != described(shapes):
            came = f"step {fetch.step} ({described(fetch.shapes)})"
            self._waits.fail(partial(self._beside.mismatch, step, shapes, came))
            self._waits.check()
        return fetch.tensors

    def _fetched(self, fetch: "_Fetch", error: str | None) -> None:
        if error is not None:
            self._waits.fail(died(self._beside.previous, error))
        elif fetch.came is not None:
            self._waits.fail(partial(self._beside.mismatch, fetch.step, fetch.shapes, fetch.came))
        fetch.done.set()

    async def send(self, step: int, bundle: Mapping[str, Tensor]) -> None:
        assert self._writer is not None, "a last stage sends nothing"
        assert self._next is not None
        self._waits.check()
        shapes = shapes_of(bundle)
        if n_bytes(shapes) == 0:
            await trio.lowlevel.checkpoint()
            return
        late = partial(self._beside.late_receiver, step, self._waits.limit_s)
        await self._waits.wait(self._room.acquire, late)
        parts = [_tensor_of(Header.of(step, shapes))]
        parts += [bundle[name].detach().contiguous() for name in sorted(bundle)]
        self._writer.submit(partial(_send, self._next, parts), self._sent)

    def _sent(self, error: str | None) -> None:
        if error is not None:
            self._waits.fail(died(self._beside.next, error))
        self._room.release()

    async def wait_sent(self) -> None:
        """Until everything that was handed over has been taken, or the next rank is gone."""
        for _ in range(self._in_flight_max):
            await self._waits.wait(self._room.acquire, lambda: PlaneError("it was not taken"))

    def abort(self, reason: str) -> None:
        self._waits.abort(reason)

    def close(self) -> None:
        self._waits.abort("this end was closed")
        for thread in (self._reader, self._writer):
            if thread is not None:
                thread.close()
        self._previous = self._next = None  # the connections go with the last who knows them


class _Fetch:
    """A bundle that the reading thread was asked for."""

    def __init__(self, step: int, shapes: Shapes) -> None:
        self.step = step
        self.shapes = shapes
        self.tensors: dict[str, Tensor] = {}
        self.came: str | None = None  # something else, described
        self.done = trio.Event()


class _Thread:
    """Runs blocking jobs in order. No daemon: to end the interpreter under gloo's feet is to abort
    the process, and each of its calls has a limit."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._run, name=name).start()

    def submit(self, job: Callable[[], None], done: Callable[[str | None], None]) -> None:
        """`done(error)` in trio's thread when the job has ended."""
        self._jobs.put((job, done))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            error = None
            try:
                job()
            except RuntimeError as problem:  # all that torch.distributed raises
                error = str(problem).partition("\n")[0]
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(done, error)
            del item, job, done  # tensors go when they are sent, not with the next job


_Job = tuple[Callable[[], None], Callable[[str | None], None]]


def _send(group: Group, parts: list[Tensor]) -> None:
    for tag, part in enumerate(parts):
        if part.numel():
            group.send([_flat(part)], RECEIVER, tag).wait()


def _receive(group: Group, fetch: _Fetch) -> None:
    data = torch.empty(HEADER.size, dtype=torch.uint8)
    group.recv([data], SENDER, 0).wait()
    header, expected = Header.unpack(data.numpy().tobytes()), Header.of(fetch.step, fetch.shapes)
    if header != expected:
        fetch.came = "garbage" if header is None else header.beside(expected)
        return
    tensors = allocated(fetch.shapes)
    for tag, name in enumerate(sorted(tensors), 1):
        if tensors[name].numel():
            group.recv([_flat(tensors[name])], SENDER, tag).wait()
    fetch.tensors = tensors


def _flat(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo need not know the dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def _tensor_of(header: Header) -> Tensor:
    return torch.frombuffer(bytearray(header.pack()), dtype=torch.uint8)


@asynccontextmanager
async def open_torch_hidden(
    beside: Neighbours, store: Store, *, in_flight_max: int, limit_s: float, host: str | None = None
) -> AsyncIterator[TorchEnd]:
    """This rank's end. `store` is one that all ranks share, used by no other start of the grid;
    `host` is the address to be reached at, None for what torch.distributed finds itself.

    Raises PlaneTimeout naming the rank that did not come within `limit_s`. A block that ends in
    peace lets out what was sent.
    """
    groups: dict[int, Group] = {}
    for first, second in ((beside.previous, beside.rank), (beside.rank, beside.next)):
        if first is None or second is None:
            continue
        role, peer = (SENDER, second) if first == beside.rank else (RECEIVER, first)
        pair = PrefixStore(f"hidden/{first}-{second}", store)
        groups[peer] = await _meet(partial(_open_group, pair, role, limit_s, host), peer, limit_s)
    previous = None if beside.previous is None else groups[beside.previous]
    following = None if beside.next is None else groups[beside.next]
    end = TorchEnd(beside, previous, following, Waits(limit_s), in_flight_max)
    groups.clear()
    del previous, following
    try:
        yield end
        if end.has_next:
            with suppress(PlaneError):
                await end.wait_sent()
    finally:
        end.close()


async def _meet(open_group: Callable[[], Group], peer: int, limit_s: float) -> Group:
    thread = _Thread(f"aserve-hidden-to-{peer}")
    groups: list[Group] = []
    errors: list[str | None] = []
    met = trio.Event()

    def done(error: str | None) -> None:
        errors.append(error)
        met.set()

    thread.submit(lambda: groups.append(open_group()), done)
    thread.close()
    with trio.move_on_after(limit_s):
        await met.wait()
    if not groups:
        why = errors[0] if errors else f"it did not come within {limit_s:g} s"
        raise PlaneTimeout((peer,), f"rank {peer}: {why}")
    return groups.pop()


def _open_group(store: Store, role: int, limit_s: float, host: str | None) -> Group:
    gloo: Any = dist.ProcessGroupGloo
    device = gloo.create_default_device() if host is None else gloo.create_device(hostname=host)
    options = gloo._Options()
    options._devices = [device]
    options._timeout = timedelta(seconds=limit_s + MARGIN_S)
    return gloo(store, role, 2, options)
