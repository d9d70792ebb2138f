"""Every CUDA kernel beside its plain twin on random shapes: what `bench.device_check` compares.

A case gives its greatest error and what it may be; outputs begin as poison. Nothing here needs a
GPU: the tests run the same cases over the kernels compiled for the host.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aserve.tensor.cuda import CudaOps, Sight
from aserve.tensor.ops import Attend, KvCopy, KvLayer
from aserve.tensor.reference import ReferenceOps
from aserve.tensor.rope import RopeTable

TWIN = ReferenceOps()


@dataclasses.dataclass(frozen=True)
class Found:
    """`error` is the greatest difference over what it may be: 1 is the limit. Or what broke."""

    error: float
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and self.error <= 1.0


class PoisonedOps(CudaOps):
    """Whatever a kernel leaves unwritten is NaN, or the greatest integer."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return torch.full(tuple(shape), poison, dtype=dtype, device=self.device)


class Random:
    """Inputs by seed, made on the CPU: the same numbers on every device."""

    def __init__(self, ops: CudaOps, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = ops.device

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype)

    def order(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.generator).int()

    def here(self, x: Tensor) -> Tensor:
        return x.to(self.device)


def close(got: Tensor, wanted: Tensor, rtol: float, atol: float) -> float:
    if not wanted.numel():
        return 0.0 if got.shape == wanted.shape else float("inf")
    difference = (got.cpu().double() - wanted.double()).abs()
    over = difference / (atol + rtol * wanted.double().abs())
    return float("inf") if bool(over.isnan().any()) else float(over.max())


def same(got: Tensor, wanted: Tensor) -> float:
    """Bit for bit."""
    return 0.0 if torch.equal(got.cpu(), wanted.cpu()) else float("inf")


Case = Callable[[CudaOps, Random], float]


def norms(ops: CudaOps, random: Random) -> float:
    errors = []
    for rows, dim in ((0, 64), (1, 1), (5, 31), (33, 576), (7, 513), (3, 4096), (2, 8191)):
        x, residual = random.normal(rows, dim), random.normal(rows, dim)
        weight = random.normal(dim)
        here = [random.here(one) for one in (residual, x, weight)]
        got = (ops.rms_norm(*here[1:], 1e-5), *ops.add_rms_norm(*here, 1e-5))
        wanted = (TWIN.rms_norm(x, weight, 1e-5), *TWIN.add_rms_norm(residual, x, weight, 1e-5))
        errors += [close(a, b, 1e-5, 1e-6) for a, b in zip(got, wanted, strict=True)]
        if rows:
            alone = ops.rms_norm(here[1][-1:].contiguous(), here[2], 1e-5)
            errors.append(same(alone, got[0][-1:]))
    heads, weight = random.normal(9, 6, 80), random.normal(80)
    some = random.here(heads)[:, 1:4]
    got_heads = ops.rms_norm(some, random.here(weight), 1e-6)
    return max(*errors, close(got_heads, TWIN.rms_norm(heads[:, 1:4], weight, 1e-6), 1e-5, 1e-6))


def ropes(ops: CudaOps, random: Random) -> float:
    errors = []
    for rows, heads, kv_heads, dim, rot in (
        (0, 2, 1, 64, 64),
        (37, 9, 3, 64, 64),
        (5, 4, 4, 96, 40),
    ):
        angles = random.normal(100, rot // 2)
        table = RopeTable(torch.cat([angles.cos(), angles.sin()], dim=1))
        positions = (random.order(100)[:rows]).contiguous()
        q, k = random.normal(rows, heads, dim), random.normal(rows, kv_heads, dim)
        q_here, k_here = random.here(q.clone()), random.here(k.clone())
        there = RopeTable(random.here(table.cos_sin_PR))
        ops.rope(q_here, k_here, random.here(positions), there)
        TWIN.rope(q, k, positions, table)
        errors += [close(q_here, q, 1e-5, 1e-5), close(k_here, k, 1e-5, 1e-5)]
    return max(errors)


def elements(ops: CudaOps, random: Random) -> float:
    errors = []
    for rows, width in ((0, 8), (1, 2), (3, 1026), (65, 4098)):
        x, y = random.normal(rows, width), random.normal(rows, width)
        errors.append(same(ops.add(random.here(x), random.here(y)), x + y))
        errors.append(close(ops.silu_mul(random.here(x)), TWIN.silu_mul(x), 1e-5, 1e-6))
    for dtype in (torch.float32, torch.bfloat16):
        table, ids = random.normal(301, 77, dtype=dtype), random.order(301)[:50]
        errors.append(same(ops.embed(random.here(table), random.here(ids)), table[ids.long()]
                           .float()))  # fmt: skip
    outside = ops.embed(random.here(table), random.here(torch.tensor([301, -1])))
    return max(*errors, 0.0 if bool(outside.isnan().all()) else float("inf"))


def linears(ops: CudaOps, random: Random) -> float:
    """Tensor cores sum in another order than torch, and a row's bits are its own."""
    errors = []
    for n, k, row_blocks in ((8, 16, 1), (7, 30, 3), (576, 576, 1), (130, 1536, 3), (1, 8, 1)):
        weight, bias = random.normal(n, k, dtype=torch.bfloat16), random.normal(n)
        packed, twin = ops.pack(weight, bias, row_blocks), TWIN.pack(weight, bias, row_blocks)
        for rows in (0, 1, 5, 64, 129):
            x = random.normal(rows, k)
            got = ops.linear(random.here(x), packed)
            error = 1e-5 * k**0.5
            errors.append(close(got, TWIN.linear(x, twin), 1e-4, error))
            parts = ops.linear_parts(random.here(x), packed)
            errors.append(close(parts, TWIN.linear_parts(x, twin), 1e-4, error))
            if rows:
                errors.append(same(ops.linear(random.here(x[-1:]), packed), got[-1:]))
    return max(errors)


def kv_moves(ops: CudaOps, random: Random) -> float:
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        for rows, heads, dim in ((0, 2, 64), (1, 3, 24), (50, 8, 128), (31, 1, 33)):
            wide = random.normal(2, 9, 2, 8, heads, dim, dtype=dtype)
            twin = KvLayer(wide[0, :, 0].clone(), wide[1, :, 1].clone())
            there = random.here(wide)
            mine = KvLayer(there[0, :, 0], there[1, :, 1])  # with gaps between pages
            slots, to = random.order(72)[:rows], random.order(72)[:rows]
            k, v = random.normal(2, rows, heads, dim)
            ops.kv_append(random.here(k), random.here(v), mine, random.here(slots))
            TWIN.kv_append(k, v, twin, slots)
            pairs = zip(ops.kv_gather(mine, random.here(slots)), TWIN.kv_gather(twin, slots),
                        strict=True)  # fmt: skip
            errors += [same(a, b) for a, b in pairs]
            ops.kv_move(mine, random.here(slots), random.here(to))
            TWIN.kv_move(twin, slots, to)
            errors += [same(mine.k_PSHD, twin.k_PSHD), same(mine.v_PSHD, twin.v_PSHD)]
    return max(errors)


def kv_copies(ops: CudaOps, random: Random) -> float:
    errors = []
    for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 24), (torch.int8, 68)):
        pools = [(random.normal(2, 12, size, 3, dim) * 40).to(dtype) for size in (16, 6)]
        for begin, end in ((0, 0), (0, 61), (17, 60), (5, 6)):
            source, twin = KvLayer(*pools[0]), KvLayer(*pools[1].clone())
            mine = KvLayer(*random.here(pools[1]))
            tables = [random.order(12), random.order(12)]
            copy = KvCopy(*tables, end, begin, head_from=1, head_to=0, heads=2)
            TWIN.kv_copy(source, twin, copy)
            there = dataclasses.replace(copy, pages_from=random.here(tables[0]),
                                        pages_to=random.here(tables[1]))  # fmt: skip
            ops.kv_copy(KvLayer(*random.here(pools[0])), mine, there)
            errors += [same(mine.k_PSHD, twin.k_PSHD), same(mine.v_PSHD, twin.v_PSHD)]
    return max(errors)


def context_parallel(ops: CudaOps, random: Random) -> float:
    errors = []
    for kind in ("interleave", "zigzag"):
        for cp, lengths in ((1, (7,)), (3, (1, 130, 0, 44)), (4, ()), (2, (0,))):
            x = random.normal(sum(lengths), 5)
            splits = [ops.cp_split(random.here(x), kind, cp, r, lengths) for r in range(cp)]
            wanted = [TWIN.cp_split(x, kind, cp, rank, lengths) for rank in range(cp)]
            errors += [same(a, b) for a, b in zip(splits, wanted, strict=True)]
            errors.append(same(ops.cp_join(torch.cat(splits), kind, cp, lengths), x))
    return max(errors)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Rows of one sequence: their positions, and the path of each if they are a tree."""

    kv_len: int
    positions: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...] = ()

    def seen(self, window: int) -> Tensor:
        """bool [rows, kv_len]."""
        key, rows = torch.arange(self.kv_len), []
        for row, position in enumerate(self.positions):
            at = key
            if self.paths:
                start = position + 1 - len(self.paths[row])
                at = torch.where(key < start, key, position + 1)
                for depth, place in enumerate(self.paths[row]):
                    at[start + place] = start + depth
            rows.append((at <= position) & ((at > position - window) | (window == 0)))
        return torch.stack(rows) if rows else torch.zeros(0, self.kv_len, dtype=torch.bool)


def tree(text_len: int, parents: Sequence[int]) -> Chunk:
    paths: list[tuple[int, ...]] = []
    for row, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), row))
    positions = tuple(text_len + len(path) - 1 for path in paths)
    return Chunk(text_len + len(parents), positions, tuple(paths))


@dataclasses.dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.bfloat16


class Step:
    """Chunks in pages of 16. `fill` writes keys and values, and has what the pages stand for."""

    def __init__(self, ops: CudaOps, random: Random, chunks: Sequence[Chunk], shape: Heads) -> None:
        self.ops, self.random, self.chunks, self.shape = ops, random, chunks, shape
        counts = [-(-chunk.kv_len // 16) for chunk in chunks]
        pages = iter(random.order(sum(counts) + 2).tolist())
        head_len = shape.dim + 4 * (shape.dtype is torch.int8)
        poison = -1 if shape.dtype is torch.int8 else float("nan")
        size = (2, sum(counts) + 2, 16, shape.kv_heads, head_len)
        self.kv = KvLayer(*torch.full(size, poison, dtype=shape.dtype, device=ops.device))
        self.table = torch.zeros(len(chunks), max([1, *counts]), dtype=torch.int32)
        for n, count in enumerate(counts):
            self.table[n, :count] = torch.tensor([next(pages) for _ in range(count)])
        rows = sum(len(chunk.positions) for chunk in chunks)
        self.q = random.normal(rows, shape.heads, shape.dim)
        self.wide: list[tuple[Tensor, Tensor]] = []

    def fill(self) -> "Step":
        for n, chunk in enumerate(self.chunks):
            place = torch.arange(chunk.kv_len)
            slots = self.random.here((self.table[n][place // 16] * 16 + place % 16).int())
            k, v = self.random.normal(2, chunk.kv_len, self.shape.kv_heads, self.shape.dim)
            self.ops.kv_append(self.random.here(k), self.random.here(v), self.kv, slots)
            gathered = self.ops.kv_gather(self.kv, slots)
            self.wide.append((self._wide(gathered[0]), self._wide(gathered[1])))
        return self

    def _wide(self, rows: Tensor) -> Tensor:
        if rows.dtype is not torch.int8:
            return rows.cpu().double()
        scale = rows[..., self.shape.dim :].contiguous().view(torch.float32)
        return (rows[..., : self.shape.dim].float() * scale).cpu().double()

    def attend(self) -> Attend:
        starts = [0]
        for chunk in self.chunks:
            starts.append(starts[-1] + len(chunk.positions))
        positions = [place for chunk in self.chunks for place in chunk.positions]
        lens = [chunk.kv_len for chunk in self.chunks]
        start, at, kv_len = (
            self.random.here(torch.tensor(x, dtype=torch.int32)) for x in (starts, positions, lens)
        )
        return Attend(at, at, self.random.here(self.table), start, kv_len)

    def sight(self, window: int = 0, sinks: Tensor | None = None) -> Sight:
        every = [path for chunk in self.chunks
                 for path in (chunk.paths or ((),) * len(chunk.positions))]  # fmt: skip
        starts = [0]
        for path in every:
            starts.append(starts[-1] + len(path))
        flat = [place for path in every for place in path]
        start, paths = (
            self.random.here(torch.tensor(x, dtype=torch.int32)) for x in (starts, flat)
        )
        there = None if sinks is None else self.random.here(sinks)
        return Sight(window, there, start if flat else None, paths if flat else None)

    def got(self, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        q, sight = self.random.here(self.q), self.sight(window, sinks)
        scale = self.shape.dim**-0.5
        return self.ops.attention_with(q, self.kv, self.attend(), scale, sight)

    def wanted(self, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        group, out, begin = self.shape.heads // self.shape.kv_heads, [], 0
        for chunk, (k, v) in zip(self.chunks, self.wide, strict=True):
            q = self.q[begin : begin + len(chunk.positions)].bfloat16().double()
            begin += len(chunk.positions)
            k_LHD, v_LHD = (x.repeat_interleave(group, dim=1) for x in (k, v))
            scores = torch.einsum("rhd,lhd->hrl", q, k_LHD) * self.shape.dim**-0.5
            scores.masked_fill_(~chunk.seen(window)[None], float("-inf"))
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(-1, len(q), 1)
                scores = torch.cat([scores, column], dim=2)
            weights = scores.softmax(-1)[..., : chunk.kv_len]
            out.append(torch.einsum("hrl,lhd->rhd", weights, v_LHD))
        return torch.cat(out)


SHAPES = (Heads(9, 3, 64), Heads(32, 8, 128), Heads(4, 4, 40), Heads(8, 1, 96))
DECODE = tuple(Chunk(n, (n - 1,)) for n in (1, 64, 257, 700))
CHUNKS = (
    Chunk(300, tuple(range(170, 300))), Chunk(5, ()), Chunk(40, (3, 17, 39)), Chunk(1, (0,)),
    Chunk(600, (599,)), tree(253, (-1, 0, 0, 1, 2, 4, 1, 6)),
)  # fmt: skip
# Weights are rounded to bfloat16 before they meet the values.
ATTENTION = {"rtol": 2e-2, "atol": 1e-2}


def attention(ops: CudaOps, random: Random) -> float:
    errors = []
    for shape in SHAPES:
        for chunks in (DECODE, CHUNKS):
            step = Step(ops, random, chunks, shape).fill()
            sinks = random.normal(shape.heads)
            for window, some in ((0, None), (100, sinks), (7, None)):
                got, wanted = step.got(window, some), step.wanted(window, some)
                errors.append(close(got, wanted, **ATTENTION))
    return max(errors)


def attention_int8(ops: CudaOps, random: Random) -> float:
    errors = []
    for heads, kv_heads, dim in ((9, 3, 64), (8, 2, 128), (2, 2, 40)):
        for chunks in (DECODE, CHUNKS):
            shape = Heads(heads, kv_heads, dim, torch.int8)
            step = Step(ops, random, chunks, shape).fill()
            errors.append(close(step.got(), step.wanted(), **ATTENTION))
    return max(errors)


def attention_bits(ops: CudaOps, random: Random) -> float:
    """A row alone, beside others, and in a chunk that goes over all splits in one block."""
    errors = []
    for shape in SHAPES[:2]:
        chunks = (Chunk(40, (39,)), Chunk(1300, tuple(range(1240, 1300))))
        step = Step(ops, random, chunks, shape).fill()
        whole = step.got()[-1]
        step.chunks, step.q = (Chunk(40, (39,)), Chunk(1300, (1299,))), step.q[[0, -1]]
        errors.append(same(step.got()[-1], whole))
        step.chunks, step.q = (Chunk(40, ()), Chunk(1300, (1299,))), step.q[-1:]
        errors.append(same(step.got()[-1], whole))
    return max(errors)


CASES: dict[str, Case] = {
    "rms_norm": norms,
    "rope": ropes,
    "add, silu_mul, embed": elements,
    "linear": linears,
    "kv_append, gather, move": kv_moves,
    "kv_copy": kv_copies,
    "cp_index, split, join": context_parallel,
    "attention": attention,
    "attention, int8 KV": attention_int8,
    "attention, a row's bits": attention_bits,
}


def compare(ops: CudaOps, case: Case, seed: int) -> Found:
    try:
        return Found(case(ops, Random(ops, seed)))
    except (RuntimeError, ValueError, LookupError, AssertionError) as error:
        return Found(float("inf"), f"{type(error).__name__}: {error}".splitlines()[0])
