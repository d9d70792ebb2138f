"""`Sampler` on a GPU."""

import ctypes
import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.core.message import NONE_LEFT, TokenLogprob
from aserve.core.noise import draw_key
from aserve.tensor import cuda_library as abi
from aserve.tensor.cuda import CudaOps
from aserve.tensor.sampler import NOT_A_NUMBER, Drawn, SampleRow


class CudaSampler:
    """`sample` and `logprobs` wait for the device, for their results are Python's."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops = ops

    def sample(self, logits_RV: Tensor, rows: Sequence[SampleRow]) -> list[Drawn]:
        told = self._draw(logits_RV, rows, stops=True)
        again = [
            place
            for place, (status, _) in enumerate(told)
            if status == 2
            and rows[place].history.generated_len < rows[place].history.sampling.min_tokens
        ]
        if again:  # a grammar that is complete allows only the end; it wins over min_tokens
            some = self._draw(logits_RV[again], [rows[place] for place in again], stops=False)
            for place, one in zip(again, some, strict=True):
                told[place] = one
        drawn = [
            Drawn(token, error=(None, NOT_A_NUMBER, NONE_LEFT)[status]) for status, token in told
        ]
        for place, row in enumerate(rows):
            asked = row.history.sampling.logprobs
            if asked >= 0 and drawn[place].error is None:
                here = logits_RV[place : place + 1]
                drawn[place] = Drawn(
                    drawn[place].token, self.logprobs(here, [drawn[place].token], asked)[0]
                )
        return drawn

    def prepare(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], *, stops: bool = True
    ) -> "Prepared":
        """What the kernel reads, on the device; with `stops` stop ids that come too early are
        banned."""
        stride, vocab = self._checked(logits_RV, len(rows))
        blob = _Blob(len(rows) * ctypes.sizeof(abi.DrawRow))
        offsets = [[blob.put(x) for x in _arrays(row, stops=stops)] for row in rows]
        given = self._ops.empty((len(blob),), torch.uint8)
        fields = (abi.DrawRow * len(rows))(
            *[
                abi.DrawRow(*_addresses(given.data_ptr(), places), *_numbers(row, stops=stops))
                for row, places in zip(rows, offsets, strict=True)
            ]
        )
        if len(blob):
            given.copy_(torch.frombuffer(blob.begun_with(bytes(fields)), dtype=torch.uint8))
        edited = self._ops.empty((len(rows), vocab))
        told = self._ops.empty((2, len(rows)), torch.int32)
        call = abi.Draw(
            logits_RV.data_ptr(), given.data_ptr(), edited.data_ptr(), told[0].data_ptr(),
            told[1].data_ptr(), stride, vocab, len(rows),
        )  # fmt: skip
        return Prepared(call, told, (given, edited))

    def _draw(
        self, logits_RV: Tensor, rows: Sequence[SampleRow], *, stops: bool
    ) -> list[tuple[int, int]]:
        prepared = self.prepare(logits_RV, rows, stops=stops)
        self._ops.call("draw", prepared.call)
        status, token = prepared.told_2R.tolist()
        return list(zip(status, token, strict=True))

    def logprobs(
        self, logits_RV: Tensor, tokens: Sequence[int], top_n: int
    ) -> list[TokenLogprob | None]:
        """`top_n` is at most 128."""
        stride, vocab = self._checked(logits_RV, len(tokens))
        top_n = min(max(top_n, 0), vocab)
        if top_n > abi.TOP_N_MAX:
            raise ValueError(f"{top_n} log-probabilities of a token, at most {abi.TOP_N_MAX}")
        given = torch.tensor(tokens, dtype=torch.int32).to(self._ops.device)
        n = len(tokens)
        own, best = self._ops.empty((n,), torch.float64), self._ops.empty((n, top_n), torch.float64)
        ids = self._ops.empty((n, top_n), torch.int32)
        ok = self._ops.empty((n,), torch.int32)
        call = abi.Logprobs(
            logits_RV.data_ptr(), given.data_ptr(), own.data_ptr(), ids.data_ptr(),
            best.data_ptr(), ok.data_ptr(), stride, vocab, n, top_n,
        )  # fmt: skip
        self._ops.call("logprobs", call)
        rows = zip(tokens, ok.tolist(), own.tolist(), ids.tolist(), best.tolist(), strict=True)
        return [
            TokenLogprob(
                token,
                logprob,
                tuple(pair for pair in zip(top, values, strict=True) if pair[0] >= 0),
            )
            if is_ok
            else None
            for token, is_ok, logprob, top, values in rows
        ]

    def _checked(self, logits_RV: Tensor, row_count: int) -> tuple[int, int]:
        """Floats from a row to the next, and vocabulary."""
        self._ops.check_here(logits_RV)
        if logits_RV.dtype != torch.float32 or logits_RV.dim() != 2 or logits_RV.stride(1) != 1:
            raise ValueError("logits must be float32 [rows, vocab] with adjacent columns")
        if logits_RV.shape[0] != row_count:
            raise ValueError(f"{logits_RV.shape[0]} rows of logits for {row_count} rows")
        return logits_RV.stride(0), logits_RV.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A call of `draw` and the status and token [2, rows] it writes; keeps what the call reads."""

    call: ctypes.Structure
    told_2R: Tensor
    kept: tuple[object, ...]


class _Blob:
    """Many small arrays in one, so that they reach the device in one copy."""

    def __init__(self, head_bytes: int) -> None:
        self._bytes = bytearray(head_bytes)

    def __len__(self) -> int:
        return len(self._bytes)

    def put(self, x: np.ndarray | None) -> int | None:
        """Where it starts, a multiple of 8; None for nothing."""
        if x is None or not x.size:
            return None
        self._bytes += bytes(-len(self._bytes) % 8)
        start = len(self._bytes)
        self._bytes += np.ascontiguousarray(x).tobytes()
        return start

    def begun_with(self, head: bytes) -> bytearray:
        self._bytes[: len(head)] = head
        return self._bytes


def _arrays(row: SampleRow, *, stops: bool) -> tuple[np.ndarray | None, ...]:
    """Those of aserve_draw_row, in its order."""
    history = row.history
    return row.mask, history.bias_ids, history.bias, *history.seen, history.banned(stops=stops)


def _addresses(base: int, offsets: Sequence[int | None]) -> list[int | None]:
    return [None if offset is None else base + offset for offset in offsets]


def _numbers(row: SampleRow, *, stops: bool) -> tuple[float, ...]:
    """The rest of aserve_draw_row, in its order."""
    history, sampling = row.history, row.history.sampling
    return (
        len(history.bias_ids), len(history.seen[0]), len(history.banned(stops=stops)),
        max(sampling.top_k, 0), sampling.temperature, sampling.top_p, sampling.min_p,
        sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty,
        draw_key(sampling.seed, row.position),
    )  # fmt: skip
