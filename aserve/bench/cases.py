"""What `aserve bench kernels` measures, by name."""

from collections.abc import Callable, Iterator, Sequence

from aserve.bench import attention_cases, linear_cases, row_cases, step_cases, tree_cases
from aserve.bench.case import Case
from aserve.tensor.native import NativeOps

__all__ = ["KERNELS", "Case", "cases"]

KERNELS: dict[str, Callable[[NativeOps], Iterator[Case]]] = {
    "step": step_cases.step,
    "verify": step_cases.verify,
    "linear": linear_cases.linear,
    "gated": linear_cases.gated,
    "linear_parts": linear_cases.linear_parts,
    "attention": attention_cases.attention,
    **row_cases.KERNELS,
    "tree": tree_cases.tree,
}


def cases(ops: NativeOps, kernels: Sequence[str]) -> Iterator[Case]:
    """Every case of the named kernels, built one at a time."""
    for name in kernels:
        yield from KERNELS[name](ops)
