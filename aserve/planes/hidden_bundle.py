"""What every hidden plane shares: what a bundle looks like, who is beside whom, and waits that end
with a PlaneError when the plane breaks. No transport."""

import math
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import TypeAlias, TypeVar

import msgspec
import torch
import trio
from torch import Tensor

from aserve.core.layout import Grid
from aserve.errors import PlaneError, PlaneMismatch, PlaneTimeout, RankDied

T = TypeVar("T")

Shapes: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def shapes_of(bundle: Mapping[str, Tensor]) -> Shapes:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in bundle.items()}


def described(shapes: Shapes) -> str:
    """`hidden bfloat16[4, 576]`, in the order of names."""
    return ", ".join(
        f"{name} {str(dtype).removeprefix('torch.')}{list(shape)}"
        for name, (shape, dtype) in sorted(shapes.items(), key=lambda item: item[0])
    )


def n_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())


def allocated(shapes: Shapes) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}


class Header(msgspec.Struct, frozen=True):
    """What goes before a bundle's bytes: of which step it is, a checksum of its description, and
    how many bytes follow. Fixed in size, so that it can be read before anything is trusted."""

    step: int
    checksum: int
    n_bytes: int

    @classmethod
    def of(cls, step: int, shapes: Shapes) -> "Header":
        digest = blake2b(described(shapes).encode(), digest_size=8).digest()
        return cls(step, int.from_bytes(digest, "big", signed=True), n_bytes(shapes))

    def beside(self, expected: "Header") -> str:
        """What this one says, for who expected another."""
        if self.checksum == expected.checksum:
            return f"step {self.step} (the same names and shapes)"
        return f"step {self.step} ({self.n_bytes} bytes of other names or shapes)"

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, self.step, self.checksum, self.n_bytes)

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> "Header | None":
        """None where it is no header of ours."""
        magic, *numbers = HEADER.unpack(data)
        return cls(*numbers) if magic == MAGIC else None


HEADER = struct.Struct("<8sqqq")
MAGIC = b"aserveH1"


class Neighbours(msgspec.Struct, frozen=True):
    """A rank and its like in the stages before and after."""

    rank: int
    previous: int | None
    next: int | None

    @classmethod
    def of(cls, grid: Grid, rank: int) -> "Neighbours":
        assert 0 <= rank < grid.world, (rank, grid.world)
        before, after = rank - grid.tp, rank + grid.tp
        return cls(rank, before if before >= 0 else None, after if after < grid.world else None)

    def late_sender(self, step: int, limit_s: float) -> PlaneTimeout:
        assert self.previous is not None
        return PlaneTimeout(
            (self.previous,),
            f"rank {self.previous} sent nothing of step {step} to rank {self.rank} within "
            f"{limit_s:g} s",
        )

    def late_receiver(self, step: int, limit_s: float) -> PlaneTimeout:
        assert self.next is not None
        return PlaneTimeout(
            (self.next,),
            f"rank {self.next} took nothing from rank {self.rank} within {limit_s:g} s, which has "
            f"step {step} for it",
        )

    def mismatch(self, step: int, shapes: Shapes, sent: str) -> PlaneMismatch:
        """`sent` says what came instead."""
        return PlaneMismatch(
            f"rank {self.rank} expects step {step} ({described(shapes)}) of rank {self.previous}",
            f"rank {self.previous} sent {sent}",
        )


class Waits:
    """Waits with a limit, which a break of the plane ends. Once broken, it stays broken."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._break: Callable[[], PlaneError] | None = None
        self._scopes: dict[int, trio.CancelScope] = {}
        self._token = trio.lowlevel.current_trio_token()

    def check(self) -> None:
        """Raises what the plane broke of."""
        if self._break is not None:
            raise self._break()

    async def wait(self, function: Callable[[], Awaitable[T]], late: Callable[[], PlaneError]) -> T:
        """`await function()`; raises `late()`, and breaks, if that takes longer than the limit."""
        self.check()
        with trio.CancelScope(deadline=trio.current_time() + self.limit_s) as scope:
            self._scopes[id(scope)] = scope
            try:
                return await function()
            finally:
                del self._scopes[id(scope)]
        self.fail(late)
        self.check()
        raise AssertionError("unreachable: it is broken")

    def fail(self, error: Callable[[], PlaneError]) -> None:
        """Only the first error counts; who waits gets it at once."""
        if self._break is None:
            self._break = error
            for scope in self._scopes.values():
                scope.cancel()

    def abort(self, reason: str) -> None:
        """From any thread."""

        def fail() -> None:
            self.fail(lambda: PlaneError(f"the hidden plane was aborted: {reason}"))

        if _in_run(self._token):
            fail()
        else:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(fail)


def died(rank: int | None, why: str) -> Callable[[], PlaneError]:
    assert rank is not None
    return lambda: RankDied(rank, why)


def _in_run(token: trio.lowlevel.TrioToken) -> bool:
    try:
        return trio.lowlevel.current_trio_token() is token
    except RuntimeError:
        return False
