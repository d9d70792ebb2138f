"""What ranks tell each other beside their collectives: last calls, and why the plane is broken.

A thread writes this rank's last call to the store and looks whether anybody failed, a few times a
second: so peers can say what an absent rank does, even while its forward is stuck in a loop.
"""

import contextlib
import itertools
import threading
import time

import msgspec
from torch._C._distributed_c10d import Store

from aserve.core.layout import Grid
from aserve.planes import signature
from aserve.planes.board import Call, in_rank_order
from aserve.planes.signature import Failure, Signature
from aserve.planes.torch_exchange import Exchange

BEAT_S = 0.25  # at most: between two looks of a watch
BEATS_OF_SILENCE = 3  # before a rank whose connection broke is thought dead
JOIN_S = 2.0
FAILURE = "failure"


class Seen(msgspec.Struct, frozen=True):
    """A rank's last call as it stands in the store; `beat` counts the times it was written."""

    beat: int
    waiting: bool = False
    call: Signature | None = None


class Watch:
    """One rank's: of its forward's thread, but for `fail`, `last_call` and `close`."""

    def __init__(
        self, grid: Grid, rank: int, store: Store, exchange: Exchange, limit_s: float
    ) -> None:
        self.failure: Failure | None = None
        self._grid = grid
        self._rank = rank
        self._store = store
        self._exchange = exchange
        self._limit_s = limit_s
        first = rank // grid.tp * grid.tp
        self._stage = range(first, first + grid.tp)
        self._beat_s = min(BEAT_S, limit_s / 8)
        self._lock = threading.Lock()  # of writing to the store
        self._beat = 0
        self._now: tuple[Signature | None, bool] = None, False  # the last call, whether waiting
        self._closed = threading.Event()
        # A daemon: an interpreter that ends with a forgotten plane must not wait for it.
        self._thread = threading.Thread(target=self._run, name="aserve-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self.failure is not None:
            raise self.failure.error()

    def entered(self, call: Signature) -> None:
        self._now = call, True

    def returned(self) -> None:
        self._now = self._now[0], False

    def last_call(self) -> str:
        call, waiting = self._now
        return signature.last_seen(self._rank, call, waiting and self.failure is None)

    def _run(self) -> None:
        while not self._closed.wait(self._beat_s) and self.failure is None:
            try:
                self._write()
                told = self._told()
            except RuntimeError as error:
                told = _gone(error)
            if told is not None:
                self._break(told)

    def _write(self) -> None:
        with self._lock:
            self._beat += 1
            call, waiting = self._now
            seen = msgspec.json.encode(Seen(self._beat, waiting, call))
            self._store.set(f"call/{self._rank}", seen.decode())

    def _told(self) -> Failure | None:
        if not self._store.check([FAILURE]):
            return None
        return signature.decode_failure(self._store.get(FAILURE))

    def _read(self, rank: int) -> Seen:
        if not self._store.check([f"call/{rank}"]):
            return Seen(0)
        return msgspec.json.decode(self._store.get(f"call/{rank}"), type=Seen)

    def fail(self, failure: Failure) -> None:
        """Tell everybody, unless somebody failed before; then that is the failure."""
        with contextlib.suppress(RuntimeError):  # the store is gone, and its other users with it
            text = signature.encode_failure(failure).decode()
            failure = signature.decode_failure(self._store.compare_set(FAILURE, "", text))
        self._break(failure)

    def _break(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._exchange.wake()

    def close(self) -> None:
        """Joins the thread, unless a store that no longer answers holds it."""
        self._closed.set()
        self._thread.join(JOIN_S)

    def explain(self, call: Call, text: str, waited_s: float) -> None:
        """A call failed with gloo's text after so long: find out why, and break the plane so."""
        try:
            self._write()  # whoever finds out first asks where we are
            if waited_s >= 0.9 * self._limit_s:
                # What peers last wrote is a beat old at most.
                time.sleep(1.5 * self._beat_s)
                failure = self._told() or self._unmet(call, text)
            else:
                failure = self._severed(call, text)
        except RuntimeError as error:
            failure = _gone(error)
        self.fail(failure)

    def _unmet(self, call: Call, text: str) -> Failure:
        """We waited to the end: who is elsewhere, and where."""
        mine = call.signature
        seen = {rank: self._read(rank) for rank in self._stage if rank != self._rank}
        late = [rank for rank in self._peers(mine) if not self._meets(mine, seen[rank].call)]
        for rank in late:
            other = seen[rank].call
            if other is not None and self._parted(call, other, seen[rank].waiting):
                return signature.mismatch(*in_rank_order(mine, other))
        calls = [mine, *(one.call for one in seen.values() if one.call is not None)]
        for one, two in itertools.combinations(calls, 2):
            if self._clash(one, two):
                return signature.mismatch(*in_rank_order(one, two))
        if not late:
            return signature.broken(f"{mine}: all came, and yet: {text}")

        def awaited_by(rank: int) -> list[int] | None:
            at = seen[rank].call
            if at is None or not seen[rank].waiting:
                return None
            return [peer for peer in self._peers(at) if not self._meets(at, seen[peer].call)]

        absent, told = signature.absent(late, awaited_by)
        last = [_text(rank, seen[rank]) for rank in told]
        return signature.timeout(str(mine), self._limit_s, absent, last)

    def _peers(self, call: Signature) -> list[int]:
        members = self._grid.group(call.group, call.rank)
        return [rank for rank in members if rank not in (call.rank, self._rank)]

    def _meets(self, call: Signature, other: Signature | None) -> bool:
        members = self._grid.group(call.group, call.rank)
        if other is None or self._grid.group(other.group, other.rank) != members:
            return False
        return not signature.differ(call, other, members)

    def _clash(self, one: Signature, two: Signature) -> bool:
        """Whether one turn of a group was not the same to both, however long ago each was read."""
        turns = [(call.group, call.step, call.number) for call in (one, two)]
        members = self._grid.group(one.group, one.rank)
        return turns[0] == turns[1] and two.rank in members and not self._meets(one, two)

    def _parted(self, call: Call, other: Signature, waiting: bool) -> bool:
        """Whether one that is not in our call can never come: it waits elsewhere for us, or went
        through its turn of this group with another call."""
        members = self._grid.group(other.group, other.rank)
        if waiting:
            return self._rank in members
        mine = call.signature  # turns are counted by name, though several may have these members
        turns = (other.step, other.number), (mine.step, mine.number)
        return (other.group, members) == (mine.group, call.members) and turns[0] >= turns[1]

    def _severed(self, call: Call, text: str) -> Failure:
        """A connection broke: somebody who knows more says so, or a rank falls silent."""
        beats = {rank: self._read(rank).beat for rank in call.members if rank != self._rank}
        until_s = time.monotonic() + BEATS_OF_SILENCE * self._beat_s
        while time.monotonic() < until_s:
            if (failure := self.failure or self._told()) is not None:
                return failure
            time.sleep(0.01)
        for rank, beat in beats.items():
            seen = self._read(rank)
            if seen.beat == beat:
                why = f"its connection broke in {call.signature}; last seen: {_text(rank, seen)}"
                return Failure("died", why, ranks=(rank,))
        return signature.broken(f"{call.signature}: {text}")


def _text(rank: int, seen: Seen) -> str:
    if seen.beat == 0:
        return f"rank {rank} has not written anything yet"
    return signature.last_seen(rank, seen.call, seen.waiting)


def _gone(error: RuntimeError) -> Failure:
    text = str(error).partition("\n")[0]
    return signature.broken(f"the store through which ranks find each other is gone: {text}")
