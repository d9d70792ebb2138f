"""Tensors as the kernels in csrc take them: each is checked, then is an address or a few numbers.

Whatever does not fit is a ValueError that says what came and what is wanted.
"""

import math

import torch
from torch import Tensor

from aserve.tensor.ops import Tree

_F32, _BF16, _I32 = torch.float32, torch.bfloat16, torch.int32


def weight_dtype(name: str, x: Tensor) -> torch.dtype:
    if x.dtype is not _F32 and x.dtype is not _BF16:
        raise ValueError(f"{name} is {x.dtype}: native kernels take float32 and bfloat16")
    return x.dtype


def matrix(name: str, x: Tensor) -> torch.Size:
    if x.dtype is not _F32 or x.dim() != 2 or not x.is_contiguous():
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}: wants contiguous "
            "float32 rows"
        )
    return x.shape


def row_stride(name: str, x_THD: Tensor) -> int:
    """Elements from a row to the next; what is inside a row must be contiguous."""
    stride = x_THD.stride()
    if x_THD.dtype is not _F32 or stride[2] != 1 or stride[1] != x_THD.shape[2]:
        if x_THD.dtype is _F32 and x_THD.is_contiguous():  # dimensions of size 1 have any stride
            return x_THD.shape[1] * x_THD.shape[2]
        raise ValueError(
            f"{name} is {x_THD.dtype} {tuple(x_THD.shape)} with strides {stride}: wants float32 "
            "with contiguous heads"
        )
    return stride[0]


def require_same(x_name: str, x: Tensor, y_name: str, y: Tensor) -> None:
    if x.shape != y.shape or x.dtype is not _F32 or y.dtype is not _F32:
        raise ValueError(
            f"{x_name} is {x.dtype} {tuple(x.shape)}, {y_name} {y.dtype} {tuple(y.shape)}: want "
            "the same float32 shape"
        )
    if not (x.is_contiguous() and y.is_contiguous()):
        raise ValueError(f"{x_name} or {y_name} is not contiguous")


def norm_weight(weight_H: Tensor, dim: int) -> int:
    if weight_H.dtype is not _F32 or weight_H.shape != (dim,) or not weight_H.is_contiguous():
        raise ValueError(
            f"norm weight is {weight_H.dtype} {tuple(weight_H.shape)}: wants float32 ({dim},)"
        )
    return weight_H.data_ptr()


def indices(name: str, x: Tensor, n: int) -> int:
    if x.dtype is not _I32 or x.shape != (n,) or not x.is_contiguous():
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: wants contiguous int32 ({n},)")
    return x.data_ptr()


KV_TYPES = {_F32: 0, _BF16: 1, torch.int8: 2}  # by their number in csrc/include/aserve/number.h


def kv_type(pool: Tensor) -> int:
    if pool.dtype not in KV_TYPES:
        raise ValueError(f"pages are {pool.dtype}: they hold float32, bfloat16 or int8")
    return KV_TYPES[pool.dtype]


def pages(pool: Tensor) -> tuple[int, int, int, int, int]:
    """Shape of the pages and the stride between them; a page itself must be contiguous."""
    kv_type(pool)
    pages, page_size, heads, dim = pool.shape
    stride = pool.stride()
    if stride[1:] != (heads * dim, dim, 1) and not pool.is_contiguous():
        raise ValueError(f"pages {tuple(pool.shape)} with strides {stride}: not contiguous inside")
    page_len = page_size * heads * dim
    if pages > 1 and stride[0] < page_len:
        raise ValueError(f"pages {tuple(pool.shape)} with strides {stride}: they overlap")
    return pages, page_size, heads, dim, max(stride[0], page_len)


def tree_paths(tree: Tree | None, rows: int) -> tuple[int, int, int]:
    """Where the paths of so many rows begin, the paths, how long they are; all 0 without a tree."""
    if tree is None:
        return 0, 0, 0
    paths_len = tree.paths.numel()
    start = indices("path_start", tree.path_start_T1, rows + 1)
    return start, indices("paths", tree.paths, paths_len), paths_len


def row_bytes(x: Tensor) -> tuple[int, int, int, int]:
    """(address, rows, bytes from a row to the next, bytes of a row); a row must be contiguous."""
    if x.dim() < 1 or not (x.is_contiguous() or _rows_contiguous(x)):
        raise ValueError(f"rows of {tuple(x.shape)} with strides {x.stride()}: not contiguous")
    size = x.element_size()
    row_len = math.prod(x.shape[1:])
    stride = row_len if x.is_contiguous() else x.stride(0)
    return x.data_ptr(), x.shape[0], stride * size, row_len * size


def _rows_contiguous(x: Tensor) -> bool:
    return x.numel() > 0 and x[0].is_contiguous()
