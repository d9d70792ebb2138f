"""`Trees` by the kernels in csrc: shapes are checked, then a call is a few addresses."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve import _native
from aserve.tensor.addresses import indices, kv_type, pages
from aserve.tensor.ops import KvLayer, Tree
from aserve.tensor.tree import (
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
_NUMPY = {_F32: np.float32, _I32: np.int32, _I64: np.int64}


def _empty(shape: tuple[int, ...] | int, dtype: torch.dtype) -> Tensor:
    """Got from numpy, which does not give up the interpreter for it."""
    return torch.from_numpy(np.empty(shape, dtype=_NUMPY[dtype]))


class NativeTrees:
    """On the threads of `team`."""

    def __init__(self, team: _native.Team) -> None:
        self.team = team
        # The pools of the layers last moved, which are the same from step to step.
        self._layers: Sequence[KvLayer] = ()
        self._pools = _native.KvPools(())

    def top(self, logits_RV: Tensor, k: int) -> Top:
        if logits_RV.dtype is not _F32 or logits_RV.dim() != 2 or logits_RV.stride(1) != 1:
            raise ValueError("logits must be float32 [rows, vocab] with adjacent columns")
        rows, vocab = logits_RV.shape
        scores_RK = _empty((rows, k), dtype=_F32)
        tokens_RK = _empty((rows, k), dtype=_I32)
        logits = logits_RV.data_ptr(), logits_RV.stride(0), rows, vocab
        _native.tree_top(self.team, logits, k, scores_RK.data_ptr(), tokens_RK.data_ptr())
        return Top(scores_RK, tokens_RK)

    def under_noise(self, top: Top, noise: Noise, k: int) -> Top:
        rows, m = noise_shape(top, noise, k)
        made = Top(_empty((rows, k), dtype=_F32), _empty((rows, k), dtype=_I32))
        given = (
            _checked("scores", top.logprobs_RK, _F32),
            _checked("tokens", top.tokens_RK, _I32),
            rows,
            m,
        )
        by = (
            _checked("seeds", noise.seeds_R, _I64),
            _checked("positions", noise.positions_R, _I32),
            _checked("temperatures", noise.temperatures_R, _F32),
        )
        out = made.logprobs_RK.data_ptr(), made.tokens_RK.data_ptr(), k
        _native.tree_noise(self.team, given, by, out)
        return made

    def expand(self, pool: Pool, top: Top, beam: Beam | None = None, width: int = 0) -> Beam:
        beams, k = children_of(pool, top, beam)
        width = require_room(pool, beams * k, width or k)
        shape = pool.trees, width
        made = Beam(*(_empty(shape, dtype=_I32) for _ in range(3)))
        children = (
            _checked("scores", top.logprobs_RK, _F32),
            _checked("tokens", top.tokens_RK, _I32),
            beams,
            k,
            0 if beam is None else _checked("places", beam.places_NW, _I32),
        )
        out = made.places_NW.data_ptr(), made.tokens_NW.data_ptr(), made.rows_NW.data_ptr(), width
        _native.tree_expand(self.team, _pool(pool), pool.count, children, out)
        pool.count += beams * k
        return made

    def select(self, pool: Pool, budgets: Sequence[int]) -> Drafts:
        starts = budgets_of(pool, budgets)
        nodes = starts[-1]
        tokens_D, parents_D = _empty(nodes, dtype=_I32), _empty(nodes, dtype=_I32)
        scores_D = _empty(nodes, dtype=_F32)
        out = tokens_D.data_ptr(), parents_D.data_ptr(), scores_D.data_ptr()
        _native.tree_select(self.team, _pool(pool), pool.count, starts, out)
        return Drafts(starts, tokens_D, parents_D, scores_D)

    def lay_out(self, row_start_M: Tensor, parents_T: Tensor, starts_N: Tensor) -> Layout:
        rows = _rows(row_start_M, parents_T)
        words = _native.tree_words(rows)
        positions_T, children_T, siblings_T = (_empty(rows[3], dtype=_I32) for _ in range(3))
        mask_TW = _empty((rows[3], words), dtype=_I64)
        out = (
            indices("starts", starts_N, rows[1]),
            words,
            positions_T.data_ptr(),
            children_T.data_ptr(),
            siblings_T.data_ptr(),
            mask_TW.data_ptr(),
        )
        _native.tree_lay_out(self.team, rows, out)
        return Layout(positions_T, mask_TW, children_T, siblings_T)

    def paths(self, row_start_M: Tensor, parents_T: Tensor) -> Tree:
        return paths_of_rows(row_start_M, parents_T)

    def accept(
        self,
        row_start_M: Tensor,
        parents_T: Tensor,
        tokens_T: Tensor,
        drawn_T: Tensor,
        slots_T: Tensor | None = None,
    ) -> Accepted:
        rows = _rows(row_start_M, parents_T)
        given = (
            indices("tokens", tokens_T, rows[3]),
            indices("drawn", drawn_T, rows[3]),
            0 if slots_T is None else indices("slots", slots_T, rows[3]),
        )
        path_T, kept_T = _empty(rows[3], dtype=_I32), _empty(rows[3], dtype=_I32)
        lengths_N, next_N = _empty(rows[1], dtype=_I32), _empty(rows[1], dtype=_I32)
        told = path_T.data_ptr(), kept_T.data_ptr(), lengths_N.data_ptr(), next_N.data_ptr()
        if slots_T is None:
            _native.tree_accept(rows, given, (*told, 0, 0))
            return Accepted(path_T, kept_T, lengths_N, next_N, None, None)
        from_T, to_T = _empty(rows[3], dtype=_I32), _empty(rows[3], dtype=_I32)
        _native.tree_accept(rows, given, (*told, from_T.data_ptr(), to_T.data_ptr()))
        return Accepted(path_T, kept_T, lengths_N, next_N, from_T, to_T)

    def compact(
        self, layers: Sequence[KvLayer], starts_M: Tensor, slots_from: Tensor, slots_to: Tensor
    ) -> None:
        if layers is not self._layers:
            self._pools = _native.KvPools(
                [
                    (kv_type(pool), pool.data_ptr(), pages(pool))
                    for layer in layers
                    for pool in (layer.k_PSHD, layer.v_PSHD)
                ]
            )
            self._layers = layers
        n = len(slots_from)
        start, end = indices("slots_from", slots_from, n), indices("slots_to", slots_to, n)
        _native.kv_move_all(self.team, self._pools, start, end, n)


def paths_of_rows(row_start_M: Tensor, parents_T: Tensor) -> Tree:
    """`Trees.paths` of what is in the CPU's memory."""
    rows = _rows(row_start_M, parents_T)
    path_start_T1 = _empty((rows[3] + 1,), dtype=_I32)
    length = _native.tree_paths(rows, path_start_T1.data_ptr(), 0)
    paths = _empty((length,), dtype=_I32)
    if length:
        _native.tree_paths(rows, path_start_T1.data_ptr(), paths.data_ptr())
    return Tree(path_start_T1, paths)


def _checked(name: str, x: Tensor, dtype: torch.dtype) -> int:
    if x.dtype is not dtype or not x.is_contiguous():
        raise ValueError(f"{name} are {x.dtype} with strides {x.stride()}: want contiguous {dtype}")
    return x.data_ptr()


def _pool(pool: Pool) -> tuple[int, int, int, int, int]:
    return (
        _checked("scores", pool.scores_NC, _F32),
        _checked("tokens", pool.tokens_NC, _I32),
        _checked("parents", pool.parents_NC, _I32),
        pool.capacity,
        pool.trees,
    )


def _rows(row_start_M: Tensor, parents_T: Tensor) -> tuple[int, int, int, int]:
    """As the kernels take rows of trees: where each begins, trees, parents, rows."""
    n, total = len(row_start_M), len(parents_T)
    if n < 1:
        raise ValueError("offsets of trees begin with 0")
    return (
        indices("row_start", row_start_M, n), n - 1, indices("parents", parents_T, total), total
    )  # fmt: skip
