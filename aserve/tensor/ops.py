"""What a model asks of its device: the `Ops` Protocol, the data its calls share, how to open one.

Activations are float32 (the twin also takes float64). Weights are bfloat16 or float32; a bfloat16
linear rounds its input rows to bfloat16, sums in float32 and returns float32. KV may also be int8.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from aserve.errors import ConfigError
from aserve.tensor.rope import RopeTable

WeightFormat = Literal["f32", "bf16", "q8", "q4", "q4m"]
BlockKind = Literal["Q8_0", "Q4_0", "Q4_1"]
BLOCK_FORMATS: dict[BlockKind, WeightFormat] = {"Q8_0": "q8", "Q4_0": "q4", "Q4_1": "q4m"}


class Linear(Protocol):
    """A packed weight [n, k] with its bias. Only the `Ops` that packed it can use it.

    `format` is how it is kept: q8 and q4 are integers with a scale, q4m with a scale and a minimum,
    each for 32 columns of a row. `dtype` is what activations are rounded to: bfloat16 for those.
    """

    @property
    def format(self) -> WeightFormat: ...

    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def row_blocks(self) -> int: ...


SCALE_BYTES = 4  # of a head of int8 KV: a float32 behind its values


@dataclasses.dataclass(frozen=True, slots=True)
class KvLayer:
    """One layer's pages: [pages, page_size, kv_heads, head_dim] each; a page is contiguous.

    Of int8 a head is `head_dim` values and then the bytes of their scale, the greatest magnitude of
    that token's head / 127; so whatever moves heads of KV about moves their scales with them.
    """

    k_PSHD: Tensor
    v_PSHD: Tensor

    @property
    def head_dim(self) -> int:
        stored = self.k_PSHD.shape[3]
        return stored - SCALE_BYTES if self.k_PSHD.dtype == torch.int8 else stored


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """Which keys rows of drafted trees see beyond those before the tree; int32.

    The path of row t is `paths[path_start_T1[t]:path_start_T1[t + 1]]`: the rows from a root down
    to itself, by their place after the sequence's KV, which ends where its tree begins. Its
    position is that length + its depth. Row i of a tree has its KV in the slot of place i. A row
    without a path is of a sequence without a tree.
    """

    path_start_T1: Tensor
    paths: Tensor


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    """Of each row of a tree the path from a root to itself. A parent of -1 is a root's; others come
    before their children."""
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), row])
    return paths


def tree_of(paths: Sequence[Sequence[int]]) -> Tree:
    """Of the paths of all rows, empty where there is no tree."""
    ends = [0]
    for path in paths:
        ends.append(ends[-1] + len(path))
    flat = [place for path in paths for place in path]
    return Tree(torch.tensor(ends, dtype=torch.int32), torch.tensor(flat, dtype=torch.int32))


@dataclasses.dataclass(frozen=True, slots=True)
class Attend:
    """Who sees what in one step. All int32; rows in plan order, N sequences.

    Sequence n owns rows `row_start_M[n]:row_start_M[n + 1]`, maybe none. Row t stands at position
    `positions_T[t]` and sees every key of its sequence up to there, this step's included. Positions
    of a sequence ascend; they need not be consecutive, as under context parallelism. Rows of a tree
    see their own path instead of what is in the pages after its beginning, and are in any order.
    """

    slots_T: Tensor  # page * page_size + offset for `kv_append`: of these rows, or of more
    positions_T: Tensor  # one a row of q, below kv_len
    page_table_NP: Tensor  # page ids, padded with 0
    row_start_M: Tensor  # N + 1 entries
    kv_len_N: Tensor  # KV length in the pool, with this step's rows on all ranks
    tree: Tree | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KvCopy:
    """Tokens [begin, end) of one sequence, `heads` KV heads of them, from one pool to another.

    The pools may differ in page size and heads. The page tables are int32, from position 0 on; each
    destination page occurs once.
    """

    pages_from: Tensor
    pages_to: Tensor
    end: int
    begin: int = 0
    head_from: int = 0
    head_to: int = 0
    heads: int | None = None  # None: as many as the source has

    def check(self, source_PSHD: Tensor, to_PSHD: Tensor, heads: int) -> None:
        """Raises ValueError where these pools and page tables do not hold what is copied."""
        if source_PSHD.dtype != to_PSHD.dtype or source_PSHD.shape[3] != to_PSHD.shape[3]:
            raise ValueError("pages differ in dtype or head_dim")
        if not 0 <= self.begin <= self.end:
            raise ValueError(f"tokens [{self.begin}, {self.end}) are no range")
        for name, pool, first, table in (
            ("source", source_PSHD, self.head_from, self.pages_from),
            ("destination", to_PSHD, self.head_to, self.pages_to),
        ):
            if heads < 1 or first < 0 or first + heads > pool.shape[2]:
                raise ValueError(f"heads are outside the {name}")
            if self.begin < self.end and self.end > len(table) * pool.shape[1]:
                raise ValueError(f"tokens are outside the {name}'s pages")


CpKind = Literal["interleave", "zigzag"]


class Ops(Protocol):
    """Every operation a model is made of. Shapes by suffix: T rows, H heads, G KV heads, D dim."""

    def pack(self, weight_NK: Tensor, bias_N: Tensor | None = None, row_blocks: int = 1) -> Linear:
        """Lay out a weight for `linear`. With `row_blocks` b, K is summed in b equal blocks, each
        from zero, added left to right: what a row-parallel split over b ranks would give."""
        ...

    def pack_blocks(
        self,
        blocks_NB: Tensor,
        kind: BlockKind,
        k: int,
        bias_N: Tensor | None = None,
        row_blocks: int = 1,
    ) -> Linear:
        """Lay out a quantised weight from the bytes of a GGUF tensor: uint8 [n, row bytes], in a
        row blocks of 32 columns (ggml-common.h): float16 d, float16 m in Q4_1, then 32 int8 or 16
        bytes of two nibbles, columns j and j + 16. A weight is d * q, d * (nibble - 8) or d *
        nibble + m, rounded to bfloat16 where products take it so (tiles of AMX); in memory it is
        never expanded. ValueError unless k / row_blocks is a multiple of 32."""
        ...

    def linear(self, x_TK: Tensor, weight: Linear) -> Tensor:
        """[T, K] -> [T, N]. Bit for bit `sum_blocks(linear_parts(x)) + bias`."""
        ...

    def linear_parts(self, x_TK: Tensor, weight: Linear) -> Tensor:
        """[T, K] -> [row_blocks, T, N]: the sum over each row block, from zero and without the
        bias. Packed alone, with its columns of x, a block gives the same bits; so blocks may be
        split over ranks, and `Collective.all_reduce` of all of them is what one rank gives."""
        ...

    def embed(self, table_VH: Tensor | Linear, ids_T: Tensor) -> Tensor:
        """Rows of the table, widened to float32. Ids are int64 or int32. A packed weight will do as
        the table: with tied embeddings one copy serves both ends of the model."""
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension (Zhang & Sennrich 2019)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor: ...

    def add_rms_norm(
        self, residual_TH: Tensor, x_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(residual + x, its rms_norm)."""
        ...

    def rope(self, q_THD: Tensor, k_TGD: Tensor, positions_T: Tensor, cos_sin: RopeTable) -> None:
        """Rotate the first `rot` dims of each head in place, pairs (i, i + rot / 2)."""
        ...

    def silu_mul(self, gate_up_TF2: Tensor) -> Tensor:
        """silu(first half) * second half: [T, 2F] -> [T, F]."""
        ...

    def kv_append(self, k_TGD: Tensor, v_TGD: Tensor, kv: KvLayer, slots_T: Tensor) -> None: ...

    def kv_gather(self, kv: KvLayer, slots_T: Tensor) -> tuple[Tensor, Tensor]:
        """[T, G, D] of k and v in the dtype of the cache."""
        ...

    def kv_move(self, kv: KvLayer, slots_from: Tensor, slots_to: Tensor) -> None:
        """Every source is read before any destination is written. Destinations are distinct."""
        ...

    def kv_copy(self, source: KvLayer, to: KvLayer, copy: KvCopy) -> None:
        """Copy between layouts of one dtype; nothing else of the destination is touched."""
        ...

    def attention(
        self,
        q_THD: Tensor,
        kv: KvLayer,
        attend: Attend,
        scale: float,
        window: int = 0,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """softmax(q k^T * scale) v over the keys in its pages that a row sees: [T, H, D].

        With a window a row at position p sees no key before p - window + 1. `sinks_H` (float32)
        are one more logit each in the softmax of a head, without a value (as in gpt-oss). A row of
        a tree has the bits of the same token in a plain sequence.
        """
        ...

    # Context parallelism splits the rows of a group, `lengths[n]` of sequence n one after the
    # other, over cp ranks. `interleave` gives row j to rank j % cp. `zigzag` cuts a sequence in 2
    # cp blocks, the first length % (2 cp) of them one longer, and gives rank r blocks r and 2 cp -
    # 1 - r. A rank keeps its rows in the order of the group, so those of a sequence are together
    # and their positions ascend, which `attention` asks for. A model's rows are cut by `cp_index`
    # before anything is computed of them; `cp_split` and `cp_join` are for whoever has them whole.

    def cp_counts(self, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        """int32 [cp, sequences]: how many rows of each sequence each rank holds."""
        ...

    def cp_index(self, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]) -> Tensor:
        """int32: the rows of the group that a rank holds, in its order."""
        ...

    def cp_split(
        self, x: Tensor, kind: CpKind, cp: int, rank: int, lengths: Sequence[int]
    ) -> Tensor:
        """The rows of x, [sum(lengths), ...] of any dtype, that a rank holds: x[cp_index]."""
        ...

    def cp_join(self, x: Tensor, kind: CpKind, cp: int, lengths: Sequence[int]) -> Tensor:
        """The splits of all ranks, one after the other as all_gather gives them, back in the order
        of the group."""
        ...


def open_ops(kernels: Literal["native", "reference"], threads: int, fused: bool = True) -> Ops:
    """The implementation by name. `threads` counts the caller; the reference follows torch.

    `fused`: native ones come with the blocks of `aserve.tensor.blocks`.
    """
    if kernels == "reference":
        from aserve.tensor.reference import ReferenceOps

        return ReferenceOps()
    if kernels != "native":
        raise ConfigError(f"compute.kernels is {kernels!r}: use 'native' or 'reference'")
    if threads < 1:
        raise ConfigError(f"compute.threads is {threads}: at least 1")
    try:
        from aserve.tensor.native import NativeOps
    except ImportError as error:
        raise ConfigError(
            f"the native kernels are not built ({error}): run `make setup`, or use "
            "--compute.kernels reference"
        ) from error
    try:
        return NativeOps(threads, fused)
    except RuntimeError as error:
        raise ConfigError(
            f"compute.threads {threads}: this system will not give so many ({error})"
        ) from error
