"""How long the CUDA kernels take beside their floors, on shapes of an 8B model.

A floor is the larger of the bytes a call must move over the bandwidth, and its operations over the
rate of a matrix product, both measured in the same run. Working sets are larger than the L2 cache
or are taken in turns, so that a row is the cost out of memory.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from aserve.tensor import cuda_library as abi
from aserve.tensor.cuda import CudaOps
from aserve.tensor.cuda_sampler import CudaSampler
from aserve.tensor.rope import RopeTable
from bench import device_draws
from bench.device_cases import Chunk, Heads, Random, Step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """`FULL` for a device; the tests take less."""

    hidden: int
    inner: int
    heads: Heads
    vocab: int
    context: int
    chunk: int
    streams: tuple[int, ...]
    copy_bytes: int
    square: int
    repeats: int
    turns_bytes: int  # of operands that take turns


FULL = Sizes(
    hidden=4096, inner=14336, heads=Heads(32, 8, 128), vocab=128256, context=4096, chunk=2048,
    streams=(1, 8, 32, 128), copy_bytes=1 << 30, square=8192, repeats=20, turns_bytes=256 << 20,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Timing:
    """One call. `turns` are its operands in turn: as many calls, each with its own."""

    kernel: str
    shape: str
    bytes: float
    operations: float
    turns: tuple[Callable[[], object], ...]


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bytes read and written a second, bfloat16 operations a second."""

    bandwidth: float
    rate: float


@dataclasses.dataclass(frozen=True)
class Row:
    """Microseconds; `over` is how many floors the kernel takes."""

    kernel: str
    shape: str
    bound: str
    floor: float
    taken: float

    @property
    def over(self) -> float:
        return self.taken / self.floor


class Clock:
    """Seconds a call of several, on a GPU by events around a graph of them: no launch counts."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self._device = device
        self._repeats = repeats

    def seconds(self, turns: tuple[Callable[[], object], ...]) -> float:
        for call in turns:
            call()
        if self._device.type != "cuda":
            begin = time.perf_counter()
            for call in turns:
                call()
            return (time.perf_counter() - begin) / len(turns)
        return self._on_device(turns)

    def _on_device(self, turns: tuple[Callable[[], object], ...]) -> float:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in turns:
                call()
        taken = []
        for _ in range(self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3 / len(turns))
        return statistics.median(taken)


def ceilings(ops: CudaOps, sizes: Sizes, clock: Clock) -> Ceilings:
    """A copy through torch, and its product of square bfloat16 matrices."""
    source = torch.ones(sizes.copy_bytes // 4, device=ops.device)
    to = torch.empty_like(source)
    copy_s = clock.seconds((lambda: to.copy_(source),))
    a, b = torch.randn(2, sizes.square, sizes.square, device=ops.device).bfloat16()
    product_s = clock.seconds((lambda: a @ b,))
    return Ceilings(2 * source.nbytes / copy_s, 2 * sizes.square**3 / product_s)


def row(timing: Timing, found: Ceilings, clock: Clock) -> Row:
    by_memory, by_rate = timing.bytes / found.bandwidth, timing.operations / found.rate
    bound = "memory" if by_memory >= by_rate else "compute"
    taken = clock.seconds(timing.turns)
    return Row(timing.kernel, timing.shape, bound, max(by_memory, by_rate) * 1e6, taken * 1e6)


def turns(n_bytes: float, sizes: Sizes) -> int:
    """How many operands of that size outgrow the caches together."""
    return int(min(64, max(2, sizes.turns_bytes // max(1, n_bytes))))


def timings(ops: CudaOps, sizes: Sizes) -> Iterator[Timing]:
    random = Random(ops, 7)
    yield from linears(ops, random, sizes)
    yield from decode(ops, random, sizes)
    yield from prefill(ops, random, sizes)
    yield from rows(ops, random, sizes)
    yield from kv(ops, random, sizes)
    yield from sampling(ops, random, sizes)


def linears(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    for n, k in ((sizes.hidden, sizes.hidden), (2 * sizes.inner, sizes.hidden),
                 (sizes.hidden, sizes.inner)):  # fmt: skip
        count = turns(2 * n * k, sizes)
        many = [ops.pack(torch.randn(n, k, device=ops.device).bfloat16()) for _ in range(count)]
        for m in (*sizes.streams, sizes.chunk):
            x = random.here(random.normal(m, k))
            yield Timing(
                "linear", f"{m} x {k} -> {n}", 2 * n * k + 4 * m * k + 4 * m * n, 2 * m * n * k,
                tuple(lambda w=w, x=x: ops.linear(x, w) for w in many),
            )  # fmt: skip


def decode(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    for dtype in (torch.bfloat16, torch.int8):
        shape = dataclasses.replace(sizes.heads, dtype=dtype)
        token = 2 * shape.kv_heads * (2 * shape.dim if dtype is torch.bfloat16 else shape.dim + 4)
        for streams in sizes.streams:
            chunks = (Chunk(sizes.context, (sizes.context - 1,)),) * streams
            n_bytes = streams * sizes.context * token
            count = turns(n_bytes, sizes)
            many = [attend_call(noise(ops, random, chunks, shape)) for _ in range(count)]
            yield Timing(
                "attention, decode", f"{streams} x {sizes.context} keys, {str(dtype)[6:]}",
                n_bytes, 4 * streams * sizes.context * shape.heads * shape.dim, tuple(many),
            )  # fmt: skip


def noise(ops: CudaOps, random: Random, chunks: tuple[Chunk, ...], shape: Heads) -> Step:
    """A step whose pages are filled where they are."""
    step = Step(ops, random, chunks, shape)
    for pool in (step.kv.k_PSHD, step.kv.v_PSHD):
        if pool.dtype is torch.int8:
            pool.random_(-127, 128)
            scale = torch.tensor([0.01], device=pool.device).view(torch.int8)
            pool[..., shape.dim :] = scale
        else:
            pool.normal_()
    return step


def prefill(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    for begin in (0, sizes.context - sizes.chunk):
        end = begin + sizes.chunk
        chunks = (Chunk(end, tuple(range(begin, end))),)
        step = noise(ops, random, chunks, sizes.heads)
        pairs = sum(range(begin + 1, end + 1))
        yield Timing(
            "attention, chunk", f"rows {begin} to {end}", 2 * step.q.nbytes,
            4 * pairs * sizes.heads.heads * sizes.heads.dim, (attend_call(step),),
        )  # fmt: skip


def attend_call(step: Step) -> Callable[[], Tensor]:
    """With everything on the device beforehand."""
    q, attend, sight = step.random.here(step.q), step.attend(), step.sight()
    scale = step.shape.dim**-0.5
    return lambda: step.ops.attention_with(q, step.kv, attend, scale, sight)


def rows(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    shape = sizes.heads
    weight = random.here(random.normal(sizes.hidden))
    angles = random.normal(sizes.context, shape.dim // 2)
    table = RopeTable(random.here(torch.cat([angles.cos(), angles.sin()], dim=1)))
    for m in (sizes.streams[-1], sizes.chunk):
        width = sizes.hidden
        count = turns(16 * m * width, sizes)
        xs = [torch.randn(2, m, width, device=ops.device) for _ in range(count)]
        yield Timing("add_rms_norm", f"{m} x {width}", 16 * m * width, 0, tuple(
            lambda x=x: ops.add_rms_norm(x[0], x[1], weight, 1e-5) for x in xs))  # fmt: skip
        gates = [torch.randn(m, 2 * sizes.inner, device=ops.device) for _ in range(2)]
        yield Timing("silu_mul", f"{m} x {sizes.inner}", 12 * m * sizes.inner, 0, tuple(
            lambda x=x: ops.silu_mul(x) for x in gates))  # fmt: skip
        at = random.here(torch.arange(m, dtype=torch.int32) % sizes.context)
        heads = shape.heads + shape.kv_heads
        qks = [torch.randn(m, heads, shape.dim, device=ops.device) for _ in range(count)]
        yield Timing("rope", f"{m} x {heads} heads", 8 * m * heads * shape.dim, 0, tuple(
            lambda x=x, at=at: ops.rope(x[:, : shape.heads], x[:, shape.heads :], at, table)
            for x in qks))  # fmt: skip


def kv(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    shape, m = sizes.heads, sizes.chunk
    for dtype in (torch.bfloat16, torch.int8):
        now = dataclasses.replace(shape, dtype=dtype)
        step = noise(ops, random, (Chunk(m, (m - 1,)),), now)
        slots = random.here(random.order(m))
        k, v = torch.randn(2, m, shape.kv_heads, shape.dim, device=ops.device)
        token = step.kv.k_PSHD[0, 0].nbytes * 2
        label = f"{m} tokens, {str(dtype)[6:]}"
        yield Timing("kv_append", label, m * token + 2 * k.nbytes, 0, (
            lambda s=step, x=slots, k=k, v=v: ops.kv_append(k, v, s.kv, x),))  # fmt: skip
        yield Timing("kv_gather", label, 2 * m * token, 0, (
            lambda s=step, x=slots: ops.kv_gather(s.kv, x),))  # fmt: skip


def sampling(ops: CudaOps, random: Random, sizes: Sizes) -> Iterator[Timing]:
    for name, parameters in (
        ("greedy", {"temperature": 0.0}),
        ("top_k, top_p", {"temperature": 0.8, "top_k": 50, "top_p": 0.95}),
        ("top_p", {"temperature": 0.8, "top_p": 0.95}),
    ):
        for streams in (1, sizes.streams[-1]):
            logits = torch.randn(streams, sizes.vocab, device=ops.device) * 3
            prepared = CudaSampler(ops).prepare(
                logits, [device_draws.one_row(place, parameters) for place in range(streams)]
            )
            yield Timing(
                "draw", f"{streams} x {sizes.vocab}, {name}", logits.nbytes, 0,
                (lambda p=prepared: ops.call("draw", p.call),),
            )  # fmt: skip
    logits = torch.randn(sizes.streams[-1], sizes.vocab, device=ops.device)
    call = logprob_call(ops, logits)
    yield Timing("logprobs", f"{len(logits)} x {sizes.vocab}, top 5", logits.nbytes, 0, (call,))


def logprob_call(ops: CudaOps, logits: Tensor) -> Callable[[], None]:
    n, vocab = logits.shape
    tokens, ok = ops.empty((2, n), torch.int32).zero_()
    own, best = ops.empty((n,), torch.float64), ops.empty((n, 5), torch.float64)
    ids = ops.empty((n, 5), torch.int32)
    call = abi.Logprobs(
        logits.data_ptr(), tokens.data_ptr(), own.data_ptr(), ids.data_ptr(), best.data_ptr(),
        ok.data_ptr(), vocab, vocab, n, 5,
    )  # fmt: skip
    kept = (tokens, own, best, ids, ok)  # as long as the call may come
    return lambda: ops.call("logprobs", call) if kept else None
