"""Length-prefixed frames over any trio stream, bounded on both sides. What they mean is not here.

A frame is its length as a big-endian u32 and that many bytes. A length beyond the limit is refused
before anything is allocated for it, so that a stranger's bytes cost nobody memory.
"""

import struct

import trio

from aserve.errors import PeerError

PREFIX = struct.Struct(">I")
# At least and at most as much is asked of the stream at once.
READ_BYTES, READ_BYTES_MAX = 1 << 16, 1 << 20


class Frames(trio.abc.Channel[bytes]):
    """A stream as a channel of frames.

    `receive` may be cancelled and called again: what came is kept. A `send` that is cancelled may
    have left half a frame behind, so the channel is then closed to further sending; whoever must
    be able to give up puts a task and a bounded queue in front.
    """

    def __init__(self, stream: trio.abc.Stream, peer: str, frame_bytes_max: int) -> None:
        assert 0 < frame_bytes_max < 1 << 32, frame_bytes_max
        self.stream = stream
        self.peer = peer
        self.frame_bytes_max = frame_bytes_max
        self._read = bytearray()  # what came and was not taken yet
        self._half_sent = False

    async def send(self, value: bytes) -> None:
        """Raises PeerError when the peer is gone, BrokenResourceError after a cancelled send."""
        assert len(value) <= self.frame_bytes_max, (len(value), self.frame_bytes_max)
        await self.send_raw(PREFIX.pack(len(value)) + value)

    async def send_raw(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes whose length the peer knows otherwise; errors as those of `send`."""
        if self._half_sent:
            raise trio.BrokenResourceError("a send was cancelled, half a frame may be out")
        self._half_sent = True
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            self._half_sent = False
            raise self._lost(error) from error
        self._half_sent = False

    async def receive(self) -> bytes:
        """The next frame. Raises trio.EndOfChannel where the peer ended between two frames.

        Raises PeerError where it ended inside one, announced one too long, or was lost.
        """
        n_bytes = await self._receive_length()
        while len(self._read) < PREFIX.size + n_bytes:
            missing = PREFIX.size + n_bytes - len(self._read)
            if not await self._read_more(min(max(missing, READ_BYTES), READ_BYTES_MAX)):
                came = len(self._read) - PREFIX.size
                raise PeerError(self.peer, f"ended after {came} of a frame's {n_bytes} bytes")
        frame = bytes(memoryview(self._read)[PREFIX.size : PREFIX.size + n_bytes])
        del self._read[: PREFIX.size + n_bytes]
        return frame

    async def _receive_length(self) -> int:
        while len(self._read) < PREFIX.size:
            if not await self._read_more(READ_BYTES):
                if self._read:
                    raise PeerError(self.peer, "ended inside the length of a frame")
                raise trio.EndOfChannel
        n_bytes: int = PREFIX.unpack_from(self._read)[0]
        if n_bytes > self.frame_bytes_max:
            raise PeerError(
                self.peer,
                f"announced a frame of {n_bytes} bytes, at most {self.frame_bytes_max} are "
                "accepted: it sent garbage, or is no peer of ours",
            )
        return n_bytes

    async def receive_into(self, view: memoryview) -> int:
        """Raw bytes into `view`, as many as there are, without a copy where the stream can.

        Returns how many came; 0 when the peer has ended. Cancelled, it has taken none.
        """
        if self._read:
            n_bytes = min(len(view), len(self._read))
            view[:n_bytes] = memoryview(self._read)[:n_bytes]
            del self._read[:n_bytes]
            await trio.lowlevel.checkpoint()
            return n_bytes
        try:
            if isinstance(self.stream, trio.SocketStream):
                return await self.stream.socket.recv_into(view)
            data = await self.stream.receive_some(len(view))
        except (trio.BrokenResourceError, OSError) as error:
            raise self._lost(error) from error
        view[: len(data)] = data
        return len(data)

    async def _read_more(self, n_bytes: int) -> bool:
        """False at the peer's end."""
        try:
            data = await self.stream.receive_some(n_bytes)
        except trio.BrokenResourceError as error:
            raise self._lost(error) from error
        self._read += data
        return bool(data)

    def _lost(self, error: BaseException) -> PeerError:
        cause = error.__cause__ or error
        return PeerError(self.peer, f"the connection was lost ({cause or type(cause).__name__})")

    async def aclose(self) -> None:
        await self.stream.aclose()
