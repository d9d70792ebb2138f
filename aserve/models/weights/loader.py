"""From names to packed weights: what a model asks for is first checked in one go, then read.

A model is constructed twice: with `Checklist`, which only notes what it asks for, then with
`Reader`, which delivers. So a parameter's name, shape and split stand once, beside their use.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.errors import ModelError
from aserve.models.fetch import Progress
from aserve.models.split import WHOLE, Split, bounds, slice_for
from aserve.models.weights.blocks import BLOCK, row_bytes
from aserve.models.weights.forms import Coarsest, Conversion, Group, kind_of
from aserve.models.weights.reading import read_blocks
from aserve.models.weights.source import Source
from aserve.tensor.ops import BlockKind, Linear, Ops

LISTED_MAX = 12  # of each sort of finding
ONE_RANK = Layout()
READ_AHEAD_BYTES = 32 << 20  # as read, not as stored
HARMLESS = re.compile(r".*\.rotary_emb\.inv_freq|rope_freqs\.weight")  # derived from the config
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """`name`.weight [n, k], with `name`.bias [n] if `bias`. Dimension 0 is the output.

    `coarsest` is the least that may be made of it where weights are converted.
    """

    name: str
    n: int
    k: int
    split: Split = WHOLE
    bias: bool = False
    coarsest: Coarsest = "q4"

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class RowParallel:
    """A weight whose columns are split. If `is_split`, ranks give partial sums
    (`Ops.linear_parts`), and whoever has added them up adds `bias_N`: once, and last."""

    weight: Linear
    bias_N: Tensor | None
    is_split: bool

    @property
    def n_blocks(self) -> int:
        """Of the partial sums that a rank gives."""
        return self.weight.row_blocks if self.is_split else 1

    def row_bytes(self, x: Tensor) -> int:
        """Of the partial sums of a row in the dtype of `x`."""
        return self.n_blocks * self.weight.n * x.element_size()

    def settle(self, sum_TN: Tensor) -> Tensor:
        return sum_TN if self.bias_N is None else sum_TN + self.bias_N


class Weights(Protocol):
    """What a layer takes its parameters from."""

    def linear(self, *parts: Matrix) -> Linear:
        """One weight of several with the same k, one under the other."""
        ...

    def row_parallel(self, part: Matrix, row_blocks: int) -> RowParallel:
        """A weight split by columns, summed in `row_blocks` over all ranks."""
        ...

    def vector(self, name: str, n: int) -> Tensor:
        """float32 [n], the same on every rank."""
        ...

    def table(self, name: str, rows: int, columns: int, split: Split) -> Tensor | Linear:
        """An embedding for `Ops.embed`: in the dtype of the model, or packed in blocks."""
        ...

    def held(self, split: Split, length: int) -> range:
        """Which of `length` (heads, experts, rows) are held here."""
        ...


class Checklist:
    """Notes all parameters that a rank asks for, in order; hands out nothing that could be used."""

    def __init__(self, layout: Layout = ONE_RANK, rank: int = 0) -> None:
        self.expected: dict[str, tuple[tuple[int, ...], Split]] = {}
        self.groups: list[Group] = []
        self._layout = layout
        self._rank = rank

    def linear(self, *parts: Matrix) -> Linear:
        return self._linear(parts, 1)

    def row_parallel(self, part: Matrix, row_blocks: int) -> RowParallel:
        return RowParallel(self._linear((part,), row_blocks), None, False)

    def _linear(self, parts: tuple[Matrix, ...], row_blocks: int) -> Linear:
        for part in parts:
            self._note(part.weight, (part.n, part.k), part.split)
            if part.bias:
                self._note(f"{part.name}.bias", (part.n,), _bias_split(part.split))
        names = tuple(part.weight for part in parts)
        first = parts[0]
        self.groups.append(Group(names, first.k, first.split, row_blocks, first.coarsest))
        return None  # type: ignore[return-value]

    def vector(self, name: str, n: int) -> Tensor:
        self._note(name, (n,), WHOLE)
        return None  # type: ignore[return-value]

    def table(self, name: str, rows: int, columns: int, split: Split) -> Tensor | Linear:
        self._note(name, (rows, columns), split)
        self.groups.append(Group((name,), columns, split, coarsest="int8"))
        return None  # type: ignore[return-value]

    def held(self, split: Split, length: int) -> range:
        return range(*bounds(split, length, self._layout, self._rank))

    def _note(self, name: str, shape: tuple[int, ...], split: Split) -> None:
        assert self.expected.get(name, (shape, split)) == (shape, split), name
        self.expected[name] = (shape, split)

    def check(self, source: Source) -> None:
        """Raise one ModelError that lists what is missing, misshapen and surplus."""
        found = source.entries
        missing = sorted(self.expected.keys() - found.keys())
        surplus = sorted(found.keys() - self.expected.keys())
        surplus = [name for name in surplus if not self._is_harmless(name, source)]
        misshapen = [
            f"{name} is {list(found[name].shape)}, should be {list(shape)}"
            for name, (shape, _) in self.expected.items()
            if name in found and found[name].shape != shape
        ]
        if missing or surplus or misshapen:
            raise ModelError(
                [
                    f"{source.origin}: the weights do not fit the config",
                    *_listed("missing", missing),
                    *_listed("misshapen", misshapen),
                    *_listed("surplus", surplus),
                ]
            )

    def _is_harmless(self, name: str, source: Source) -> bool:
        if name == HEAD and TABLE in self.expected:  # a tied head may be written out all the same
            return source.entries[name].shape == self.expected[TABLE][0]
        return HARMLESS.fullmatch(name) is not None


def _listed(what: str, names: list[str]) -> Iterator[str]:
    if names:
        yield f"{len(names)} {what}:"
        yield from (f"  {name}" for name in names[:LISTED_MAX])
        if len(names) > LISTED_MAX:
            yield f"  ... and {len(names) - LISTED_MAX} more"


def _bias_split(split: Split) -> Split:
    return split if split.dim == 0 else WHOLE


class Reader:
    """Reads, slices, converts and packs. Worker threads read and convert ahead of the caller."""

    def __init__(
        self,
        source: Source,
        ops: Ops,
        dtype: torch.dtype,
        layout: Layout,
        rank: int,
        weights: Conversion | None = "keep",
    ) -> None:
        self.nbytes = 0  # held in memory so far
        self._source = source
        self._ops = ops
        self._dtype = dtype
        self._layout = layout
        self._rank = rank
        self._weights = weights
        self._kinds: dict[str, BlockKind] = {}  # of what is held in blocks
        self._ahead: dict[str, Future[Tensor]] = {}
        self._queue: collections.deque[str] = collections.deque()
        self._expected: dict[str, tuple[tuple[int, ...], Split]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._taken: Callable[[int], None] = lambda n_bytes: None
        self._ahead_bytes = 0

    @contextmanager
    def reading_ahead(
        self, checklist: Checklist, threads: int, progress: Progress | None
    ) -> Iterator[None]:
        """Within this, `checklist`'s tensors are read by `threads` before they are asked for."""
        self._expected = checklist.expected
        self._queue.extend(checklist.expected)
        for group in checklist.groups:
            types = [self._source.entries[name].kind for name in group.names]
            if kind := kind_of(group, types, self._weights, self._layout):
                self._kinds.update(dict.fromkeys(group.names, kind))
        total = sum(self._source.entries[name].n_bytes for name in checklist.expected)
        done = 0

        def taken(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            if progress is not None:
                progress(done, total, "loading weights")

        self._taken = taken
        with ThreadPoolExecutor(threads, thread_name_prefix="weights") as self._pool:
            try:
                yield
            finally:
                self._pool.shutdown(cancel_futures=True)
                self._ahead.clear()
                self._queue.clear()

    def linear(self, *parts: Matrix) -> Linear:
        weights = [self._read(part.weight) for part in parts]
        bias = None
        if any(part.bias for part in parts):
            rows = zip(parts, weights, strict=True)
            biases = [self._bias(part) if part.bias else torch.zeros(len(w)) for part, w in rows]
            bias = torch.cat(biases)
        whole = weights[0] if len(weights) == 1 else torch.cat(weights)
        return self._pack(parts[0].weight, whole, bias)

    def row_parallel(self, part: Matrix, row_blocks: int) -> RowParallel:
        assert part.split.dim == 1, part
        weight = self._read(part.weight)
        bias = self._bias(part) if part.bias else None
        if not part.split.is_cut(self._layout):
            return RowParallel(self._pack(part.weight, weight, bias, row_blocks), None, False)
        blocks = 1  # in fast numerics a rank adds up what it has before it is sent
        if self._layout.numerics == "exact":
            whole = dataclasses.replace(part.split, units=row_blocks)
            blocks = len(self.held(whole, row_blocks))
        kept = None if bias is None else self._keep(bias)
        return RowParallel(self._pack(part.weight, weight, None, blocks), kept, True)

    def _pack(self, name: str, weight: Tensor, bias: Tensor | None, row_blocks: int = 1) -> Linear:
        """`weight` as it was read; tensor `name` is one of those in it."""
        if kind := self._kinds.get(name):
            k = weight.shape[1] // row_bytes(kind, BLOCK) * BLOCK
            linear = self._ops.pack_blocks(weight, kind, k, bias, row_blocks)
        else:
            linear = self._ops.pack(weight.contiguous(), bias, row_blocks)
        self.nbytes += linear.nbytes
        return linear

    def vector(self, name: str, n: int) -> Tensor:
        return self._keep(self._read(name).clone())

    def table(self, name: str, rows: int, columns: int, split: Split) -> Tensor | Linear:
        table = self._read(name)
        return self._pack(name, table, None) if name in self._kinds else self._keep(table.clone())

    def held(self, split: Split, length: int) -> range:
        return range(*bounds(split, length, self._layout, self._rank))

    def _bias(self, part: Matrix) -> Tensor:
        return self._read(f"{part.name}.bias")

    def _keep(self, tensor: Tensor) -> Tensor:
        self.nbytes += tensor.nbytes
        return tensor

    def _read(self, name: str) -> Tensor:
        self._read_ahead(name)
        tensor = self._ahead.pop(name).result()
        self._ahead_bytes -= self._size(name)
        self._taken(self._source.entries[name].n_bytes)
        return tensor

    def _read_ahead(self, wanted: str) -> None:
        assert self._pool is not None, "read inside reading_ahead"
        while self._queue and (wanted not in self._ahead or self._ahead_bytes < READ_AHEAD_BYTES):
            name = self._queue.popleft()
            self._ahead[name] = self._pool.submit(self._convert, name)
            self._ahead_bytes += self._size(name)

    def _size(self, name: str) -> int:
        shape = self._expected[name][0]
        if kind := self._kinds.get(name):
            return shape[0] * row_bytes(kind, shape[1])
        return math.prod(shape) * self._dtype.itemsize

    def _convert(self, name: str) -> Tensor:
        shape, split = self._expected[name]
        index = slice_for(split, shape, self._layout, self._rank)
        if kind := self._kinds.get(name):
            return read_blocks(self._source, name, index, kind)
        dtype = torch.float32 if len(shape) == 1 else self._dtype
        return self._source.read(name, index, dtype)
