"""Paged pools as the CUDA library takes them: each is checked, then is a struct of addresses.

Whatever does not fit is a ValueError that says what came and what is wanted.
"""

import ctypes

import torch
from torch import Tensor

from aserve.tensor import cuda_library as abi
from aserve.tensor.addresses import indices
from aserve.tensor.ops import KvCopy, KvLayer

TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


def pages_of(kv: KvLayer) -> ctypes.Structure:
    """K and V, which differ in nothing but the stride from page to page. A head of int8 ends in the
    four bytes of its scale."""
    k, v = kv.k_PSHD, kv.v_PSHD
    if k.shape != v.shape or k.dtype is not v.dtype or k.dtype not in TYPE_CODES:
        raise ValueError(f"pages of {tuple(k.shape)} {k.dtype}, {tuple(v.shape)} {v.dtype}")
    pages, page_size, heads, head_len = k.shape
    return abi.Pages(
        k=k.data_ptr(), v=v.data_ptr(), pages=pages, page_size=page_size, heads=heads,
        dim=head_len - 4 if k.dtype is torch.int8 else head_len, head_len=head_len,
        k_stride=page_stride(k), v_stride=page_stride(v), type=TYPE_CODES[k.dtype],
    )  # fmt: skip


def require_aligned(pages: ctypes.Structure) -> None:
    """That attention may load 16 bytes of bfloat16 at once, of int8 with its scale 4."""
    size, unit = (2, 16) if pages.type == 1 else (1, 4)
    for at, stride in ((pages.k, pages.k_stride), (pages.v, pages.v_stride)):
        if at % unit or stride * size % unit:
            raise ValueError(
                f"pages at {at:#x}, {stride * size} bytes apart: want {unit}-byte units"
            )


def tokens_of(pool: Tensor, slots_T: Tensor, rows: Tensor) -> ctypes.Structure:
    """Tokens of one pool and the rows [T, heads, head_len] they go to or come from."""
    pages, page_size, heads, head_len = pool.shape
    size = pool.element_size()
    return abi.Tokens(
        pool.data_ptr(), pages, page_size, heads, head_len * size, page_stride(pool) * size,
        rows.data_ptr(), indices("slots", slots_T, len(rows)), len(rows),
    )  # fmt: skip


def copy_of(x_PSHD: Tensor, y_PSHD: Tensor, copy: KvCopy) -> ctypes.Structure:
    heads = x_PSHD.shape[2] if copy.heads is None else copy.heads
    copy.check(x_PSHD, y_PSHD, heads)
    size = x_PSHD.element_size()
    return abi.Copy(
        x_PSHD.data_ptr(), y_PSHD.data_ptr(),
        indices("a page table", copy.pages_from, len(copy.pages_from)),
        indices("a page table", copy.pages_to, len(copy.pages_to)),
        x_PSHD.shape[1], x_PSHD.shape[2], page_stride(x_PSHD) * size, copy.head_from,
        y_PSHD.shape[1], y_PSHD.shape[2], page_stride(y_PSHD) * size, copy.head_to,
        heads, x_PSHD.shape[3] * size, copy.begin, copy.end,
    )  # fmt: skip


def page_stride(pool: Tensor) -> int:
    """Elements from a page to the next; a page itself must be contiguous."""
    pages, page_size, heads, head_len = pool.shape
    stride = pool.stride()
    if stride[1:] != (heads * head_len, head_len, 1) and not pool.is_contiguous():
        raise ValueError(f"pages {tuple(pool.shape)} with strides {stride}: not contiguous inside")
    page_len = page_size * heads * head_len
    if pages > 1 and stride[0] < page_len:
        raise ValueError(f"pages {tuple(pool.shape)} with strides {stride}: they overlap")
    return max(stride[0], page_len)
