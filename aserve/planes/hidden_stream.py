"""The hidden plane between processes, over the wire: a connection a pair of ranks.

A bundle is a fixed header and the tensors' own memory, in the order of names; the receiver compares
the header with its plan and then reads straight into new tensors. Tensors live on the CPU.
"""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import torch
import trio
from torch import Tensor

from aserve.errors import PeerError, PlaneTimeout
from aserve.planes.hidden_bundle import (
    HEADER,
    Header,
    Neighbours,
    Shapes,
    Waits,
    allocated,
    died,
    n_bytes,
    shapes_of,
)
from aserve.planes.terms import Terms
from aserve.wire.address import Address
from aserve.wire.connection import connect
from aserve.wire.frames import Frames
from aserve.wire.hello import Refusal
from aserve.wire.listener import Listener, open_listener
from aserve.wire.nursery import ServiceNursery

ROLE = "hidden"
# Up to here header and tensors leave in one piece: a copy costs less than a system call.
JOINED_BYTES_MAX = 1 << 16
# What the kernel may hold of a bundle: with its default a large one is a hundred wake-ups.
KERNEL_BYTES = 4 << 20


class StreamEnd:
    """A HiddenEnd over connections; made by `open_stream_hidden`."""

    def __init__(
        self, beside: Neighbours, previous: Frames | None, following: Frames | None, waits: Waits
    ) -> None:
        self.has_previous = previous is not None
        self.has_next = following is not None
        self._beside = beside
        self._previous = previous
        self._waits = waits
        self._incoming: _Incoming | None = None
        self._outbox: trio.MemorySendChannel[list[memoryview]] | None = None

    async def receive(self, step: int, shapes: Shapes) -> dict[str, Tensor]:
        assert self._previous is not None, "a first stage receives nothing"
        if n_bytes(shapes) == 0:
            self._waits.check()
            await trio.lowlevel.checkpoint()
            return allocated(shapes)
        if self._incoming is None:
            self._incoming = _Incoming(self._previous)
        read = partial(self._read, self._incoming, step, shapes)
        try:
            await self._waits.wait(
                read, partial(self._beside.late_sender, step, self._waits.limit_s)
            )
        except PeerError as error:
            self._waits.fail(died(self._beside.previous, error.reason))
        self._waits.check()
        tensors, self._incoming = self._incoming.tensors, None
        return tensors

    async def _read(self, incoming: "_Incoming", step: int, shapes: Shapes) -> None:
        header, expected = await incoming.read_header(), Header.of(step, shapes)
        if header == expected:
            await incoming.read_tensors(shapes)
        elif header is None:
            raise PeerError(self._previous.peer if self._previous else "", "sent garbage")
        else:
            self._waits.fail(partial(self._beside.mismatch, step, shapes, header.beside(expected)))

    async def send(self, step: int, bundle: Mapping[str, Tensor]) -> None:
        assert self._outbox is not None, "a last stage sends nothing"
        shapes = shapes_of(bundle)
        if n_bytes(shapes) == 0:
            self._waits.check()
            await trio.lowlevel.checkpoint()
            return
        parts = [memoryview(Header.of(step, shapes).pack())]
        parts += [memory_of(bundle[name]) for name in sorted(bundle)]
        late = partial(self._beside.late_receiver, step, self._waits.limit_s)
        await self._waits.wait(partial(self._outbox.send, parts), late)

    async def write(
        self,
        frames: Frames,
        parcels: trio.MemoryReceiveChannel[list[memoryview]],
        done: trio.Event,
    ) -> None:
        """The writing task: until the outbox is closed, or the next rank is gone."""
        try:
            async for parts in parcels:
                if sum(map(len, parts)) <= JOINED_BYTES_MAX:
                    parts = [memoryview(b"".join(parts))]
                for part in parts:
                    await frames.send_raw(part)
        except PeerError as error:
            self._waits.fail(died(self._beside.next, error.reason))
        finally:
            done.set()

    def abort(self, reason: str) -> None:
        self._waits.abort(reason)


class _Incoming:
    """A bundle on its way in. Reading may be cancelled at any point and goes on from there."""

    def __init__(self, frames: Frames) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._frames = frames
        self._header = bytearray(HEADER.size)
        self._views: list[memoryview] = [memoryview(self._header)]  # still to be filled
        self._allocated = False

    async def read_header(self) -> Header | None:
        if not self._allocated:
            await self._fill()
        return Header.unpack(self._header)

    async def read_tensors(self, shapes: Shapes) -> None:
        if not self._allocated:
            self.tensors = allocated(shapes)
            self._views = [memory_of(self.tensors[name]) for name in sorted(self.tensors)]
            self._allocated = True
        await self._fill()

    async def _fill(self) -> None:
        while self._views:
            if not self._views[0]:
                del self._views[0]
                continue
            came = await self._frames.receive_into(self._views[0])
            if came == 0:
                raise PeerError(self._frames.peer, "its connection ended")
            self._views[0] = self._views[0][came:]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor: its own where it is contiguous, else those of a copy."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if len(flat) else memoryview(b"")


@asynccontextmanager
async def open_hidden_listener(
    address: Address, terms: Terms, beside: Neighbours
) -> AsyncIterator[Listener]:
    """Where the rank of the stage before reaches this one; `.address` is what to tell it."""
    assert beside.previous is not None, "a first stage is reached by nobody"
    identity = terms.identity(ROLE, beside.rank)
    async with open_listener(address, identity, (beside.previous,)) as listener:
        yield listener


@asynccontextmanager
async def open_stream_hidden(
    beside: Neighbours,
    terms: Terms,
    *,
    listener: Listener | None,
    following: Address | None,
    limit_s: float,
) -> AsyncIterator[StreamEnd]:
    """This rank's end: a connection to the next stage at `following`, one from the stage before.

    Raises PlaneTimeout naming the rank that did not come within `limit_s`, Refusal where two ends
    do not belong together. A block that ends in peace lets out what was sent.
    """
    assert (listener is None) == (beside.previous is None), beside
    assert (following is None) == (beside.next is None), beside
    async with AsyncExitStack() as stack:
        onward = back = None
        if following is not None and beside.next is not None:
            onward = await _connect_next(beside, terms, following, limit_s)
            await stack.enter_async_context(onward)
        if listener is not None:
            back = await _accept_previous(beside, listener, limit_s)
            await stack.enter_async_context(back)
        end = StreamEnd(beside, back, onward, Waits(limit_s))
        nursery = await stack.enter_async_context(ServiceNursery())
        if onward is None:
            yield end
            return
        outbox, parcels = trio.open_memory_channel[list[memoryview]](terms.in_flight_max)
        done = trio.Event()
        end._outbox = outbox
        nursery.start_soon(end.write, onward, parcels, done)
        yield end
        outbox.close()
        with trio.move_on_after(limit_s):
            await done.wait()


def _widen(frames: Frames, limit_s: float) -> Frames:
    """Let the kernel take a bundle in few pieces, and wait for a busy receiver as long as we do."""
    stream = frames.stream
    assert isinstance(stream, trio.SocketStream)
    if stream.socket.family == socket.AF_UNIX:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
    else:  # TCP sizes its buffers itself, but trio lets it queue 16 KiB only
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, KERNEL_BYTES)
        patience_ms = round(2000 * limit_s)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
    return frames


async def _connect_next(
    beside: Neighbours, terms: Terms, address: Address, limit_s: float
) -> Frames:
    assert beside.next is not None
    try:
        connection = await connect(address, terms.identity(ROLE, beside.rank), limit_s=limit_s)
    except Refusal:
        raise
    except PeerError as error:
        raise PlaneTimeout((beside.next,), f"rank {beside.next} at {error}") from error
    return _widen(connection.frames, limit_s)


async def _accept_previous(beside: Neighbours, listener: Listener, limit_s: float) -> Frames:
    assert beside.previous is not None
    with trio.move_on_after(limit_s):
        return _widen((await listener.accept()).frames, limit_s)
    raise PlaneTimeout(
        (beside.previous,),
        f"rank {beside.previous} did not connect to rank {beside.rank} within {limit_s:g} s",
    )
