"""`Trees` on a GPU: shapes are checked, then a call of the CUDA library each, which is only queued.

What is on the device is not looked at: a parent that is not before its child counts as a root, and
a slot outside the pages is left out.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.tensor import cuda_library as abi
from aserve.tensor.addresses import indices
from aserve.tensor.cuda import CudaOps
from aserve.tensor.cuda_pages import page_stride
from aserve.tensor.ops import KvLayer, Tree
from aserve.tensor.tree import (
    MASK_BITS,
    Accepted,
    Beam,
    Drafts,
    Layout,
    Noise,
    Pool,
    Top,
    budgets_of,
    children_of,
    noise_shape,
    require_room,
)

_F32, _I32, _I64 = torch.float32, torch.int32, torch.int64

# Of pools that are moved in one call: pages, page size, bytes of a token, bytes from page to page.
Shape = tuple[int, int, int, int]


class CudaTrees:
    """`top` takes at most 128 tokens of a row, `select` at most 8192 candidates of a tree."""

    def __init__(self, ops: CudaOps) -> None:
        self._ops = ops
        # Addresses of the layers last moved, which are the same from step to step.
        self._layers: Sequence[KvLayer] = ()
        self._pools: list[tuple[Shape, int, Tensor]] = []

    def top(self, logits_RV: Tensor, k: int) -> Top:
        ops = self._ops
        ops.check_here(logits_RV)
        if logits_RV.dtype is not _F32 or logits_RV.dim() != 2 or logits_RV.stride(1) != 1:
            raise ValueError("logits must be float32 [rows, vocab] with adjacent columns")
        rows, vocab = logits_RV.shape
        if not 1 <= k <= min(vocab, abi.TOP_N_MAX):
            raise ValueError(f"{k} tokens of {vocab}, at most {abi.TOP_N_MAX}")
        any_R = torch.zeros(rows, dtype=_I32, device=ops.device)
        own_R, logprobs_RK = ops.empty((rows,), torch.float64), ops.empty((rows, k), torch.float64)
        tokens_RK, ok_R = ops.empty((rows, k), _I32), ops.empty((rows,), _I32)
        call = abi.Logprobs(
            logits_RV.data_ptr(), any_R.data_ptr(), own_R.data_ptr(),
            tokens_RK.data_ptr(), logprobs_RK.data_ptr(), ok_R.data_ptr(), logits_RV.stride(0),
            vocab, rows, k,
        )  # fmt: skip
        ops.call("logprobs", call)
        ok_R1 = ok_R.bool()[:, None]
        place = torch.arange(k, dtype=_I32, device=ops.device)
        is_there_RK = ok_R1 & (tokens_RK >= 0)
        logprobs_RK = torch.where(ok_R1, logprobs_RK, float("nan"))
        return Top(logprobs_RK.float(), torch.where(is_there_RK, tokens_RK, place))

    def under_noise(self, top: Top, noise: Noise, k: int) -> Top:
        rows, m = noise_shape(top, noise, k)
        if m > abi.NOISY_MAX:
            raise ValueError(f"noise for {m} tokens of a row, at most {abi.NOISY_MAX}")
        made = Top(self._ops.empty((rows, k)), self._ops.empty((rows, k), _I32))
        call = abi.Noise(
            self._address("scores", top.logprobs_RK, _F32),
            self._address("tokens", top.tokens_RK, _I32),
            self._address("seeds", noise.seeds_R, _I64),
            self._address("positions", noise.positions_R, _I32),
            self._address("temperatures", noise.temperatures_R, _F32),
            made.logprobs_RK.data_ptr(), made.tokens_RK.data_ptr(), rows, m, k,
        )  # fmt: skip
        self._ops.call("under_noise", call)
        return made

    def expand(self, pool: Pool, top: Top, beam: Beam | None = None, width: int = 0) -> Beam:
        beams, k = children_of(pool, top, beam)
        width = require_room(pool, beams * k, width or k)
        above = None if beam is None else self._address("places", beam.places_NW, _I32)
        made = Beam(*(self._ops.empty((pool.trees, width), _I32) for _ in range(3)))
        call = abi.Expand(
            self._address("scores", top.logprobs_RK, _F32),
            self._address("tokens", top.tokens_RK, _I32), above, made.places_NW.data_ptr(),
            made.tokens_NW.data_ptr(), made.rows_NW.data_ptr(), pool.count, beams, k, width,
        )  # fmt: skip
        self._ops.call("expand", self._pool(pool), call)
        pool.count += beams * k
        return made

    def select(self, pool: Pool, budgets: Sequence[int]) -> Drafts:
        starts = budgets_of(pool, budgets)
        if pool.count > abi.CANDIDATES_MAX:
            raise ValueError(f"{pool.count} candidates, at most {abi.CANDIDATES_MAX}")
        start_M = torch.tensor(starts, dtype=_I32).to(self._ops.device)
        tokens_D, parents_D = (self._ops.empty((starts[-1],), _I32) for _ in range(2))
        scores_D = self._ops.empty((starts[-1],))
        call = abi.Select(
            start_M.data_ptr(), tokens_D.data_ptr(), parents_D.data_ptr(), scores_D.data_ptr(),
            pool.count,
        )  # fmt: skip
        self._ops.call("select", self._pool(pool), call)
        return Drafts(starts, tokens_D, parents_D, scores_D)

    def lay_out(
        self, row_start_M: Tensor, parents_T: Tensor, starts_N: Tensor, rows_max: int = 0
    ) -> Layout:
        """`rows_max`: of any tree, where it is known; else this waits for the device."""
        n, rows = self._rows(row_start_M, parents_T)
        if not rows_max and n:
            rows_max = int(row_start_M.diff().max())
        words = max(1, -(-rows_max // MASK_BITS))
        made = Layout(
            self._ops.empty((rows,), _I32),
            self._ops.empty((rows, words), _I64),
            self._ops.empty((rows,), _I32),
            self._ops.empty((rows,), _I32),
        )
        call = abi.LayOut(
            row_start_M.data_ptr(), parents_T.data_ptr(), indices("starts", starts_N, n),
            made.positions_T.data_ptr(), made.first_child_T.data_ptr(),
            made.next_sibling_T.data_ptr(), made.mask_TW.data_ptr(), n, words,
        )  # fmt: skip
        self._ops.check_here(starts_N)
        self._ops.call("lay_out", call)
        return made

    def paths(self, row_start_M: Tensor, parents_T: Tensor) -> Tree:
        from aserve.tensor.tree_native import paths_of_rows

        here = paths_of_rows(row_start_M.cpu(), parents_T.cpu())
        device = self._ops.device
        return Tree(here.path_start_T1.to(device), here.paths.to(device))

    def accept(
        self,
        row_start_M: Tensor,
        parents_T: Tensor,
        tokens_T: Tensor,
        drawn_T: Tensor,
        slots_T: Tensor | None = None,
    ) -> Accepted:
        n, rows = self._rows(row_start_M, parents_T)
        self._ops.check_here(tokens_T, drawn_T)
        path_T, kept_T = (self._ops.empty((rows,), _I32) for _ in range(2))
        lengths_N, next_N = (self._ops.empty((n,), _I32) for _ in range(2))
        from_T = to_T = slots = None
        if slots_T is not None:
            self._ops.check_here(slots_T)
            slots = indices("slots", slots_T, rows)
            from_T, to_T = (self._ops.empty((rows,), _I32) for _ in range(2))
        call = abi.Accept(
            row_start_M.data_ptr(), parents_T.data_ptr(), indices("tokens", tokens_T, rows),
            indices("drawn", drawn_T, rows), slots, path_T.data_ptr(), kept_T.data_ptr(),
            lengths_N.data_ptr(), next_N.data_ptr(), None if from_T is None else from_T.data_ptr(),
            None if to_T is None else to_T.data_ptr(), n,
        )  # fmt: skip
        self._ops.call("accept", call)
        return Accepted(path_T, kept_T, lengths_N, next_N, from_T, to_T)

    def compact(
        self, layers: Sequence[KvLayer], starts_M: Tensor, slots_from: Tensor, slots_to: Tensor
    ) -> None:
        if layers is not self._layers:
            self._pools = self._addresses(layers)
            self._layers = layers
        self._ops.check_here(starts_M, slots_from, slots_to)
        pairs, sequences = len(slots_from), len(starts_M) - 1
        given = (
            indices("starts", starts_M, sequences + 1), indices("slots_from", slots_from, pairs),
            indices("slots_to", slots_to, pairs),
        )  # fmt: skip
        for shape, bits, pools in self._pools:
            call = abi.Compact(pools.data_ptr(), *given, len(pools), sequences, *shape, bits)
            self._ops.call("compact", call)

    def _addresses(self, layers: Sequence[KvLayer]) -> list[tuple[Shape, int, Tensor]]:
        """By shape: the low bits that some address has, and all addresses, on the device."""
        by_shape: dict[Shape, list[int]] = {}
        for layer in layers:
            for pool in (layer.k_PSHD, layer.v_PSHD):
                self._ops.check_here(pool)
                pages, page_size, heads, head_len = pool.shape
                size = pool.element_size()
                shape = pages, page_size, heads * head_len * size, page_stride(pool) * size
                by_shape.setdefault(shape, []).append(pool.data_ptr())
        found = []
        for shape, addresses in by_shape.items():
            bits = 0
            for address in addresses:
                bits |= address
            there = torch.tensor(addresses, dtype=_I64).to(self._ops.device)
            found.append((shape, bits & 15, there))
        return found

    def _address(self, name: str, x: Tensor, dtype: torch.dtype) -> int:
        self._ops.check_here(x)
        if x.dtype is not dtype or not x.is_contiguous():
            raise ValueError(
                f"{name} are {x.dtype} with strides {x.stride()}: want contiguous {dtype}"
            )
        return x.data_ptr()

    def _pool(self, pool: Pool) -> ctypes.Structure:
        return abi.TreePool(
            self._address("scores", pool.scores_NC, _F32),
            self._address("tokens", pool.tokens_NC, _I32),
            self._address("parents", pool.parents_NC, _I32), pool.capacity, pool.trees,
        )  # fmt: skip

    def _rows(self, row_start_M: Tensor, parents_T: Tensor) -> tuple[int, int]:
        """How many trees and rows there are."""
        n, rows = len(row_start_M) - 1, len(parents_T)
        if n < 0:
            raise ValueError("offsets of trees begin with 0")
        self._ops.check_here(row_start_M, parents_T)
        indices("row_start", row_start_M, n + 1)
        indices("parents", parents_T, rows)
        return n, rows
