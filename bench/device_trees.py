"""The kernels of drafted trees beside their twin, for `bench.device_check`."""

import dataclasses
import itertools

import torch
from torch import Tensor

from aserve.tensor.cuda import CudaOps
from aserve.tensor.ops import KvLayer
from aserve.tensor.tree import Beam, Noise, Pool, Top, Trees
from aserve.tensor.tree_cuda import CudaTrees
from aserve.tensor.tree_reference import ReferenceTrees
from bench.device_cases import Case, Random, close, same

TWIN = ReferenceTrees()
FAR = float("inf")


def differs(one: object, other: object) -> float:
    """Field by field and bit by bit, but that NaN is NaN."""
    errors = [0.0]
    for field in dataclasses.fields(one):  # type: ignore[arg-type]
        mine, twins = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor) and mine.is_floating_point():
            mine, twins = mine.nan_to_num(12345.0), twins.nan_to_num(12345.0)
        is_same = same(mine, twins) == 0 if isinstance(mine, Tensor) else mine == twins
        errors.append(0.0 if is_same else FAR)
    return max(errors)


def here(random: Random, top: Top) -> Top:
    return Top(random.here(top.logprobs_RK), random.here(top.tokens_RK))


def levels(random: Random, trees: int, k: int, depth: int, *, nan: float) -> list[Top]:
    """Few distinct scores, and a part of them NaN."""
    made = []
    for level in range(depth):
        shape = (trees if level == 0 else trees * k, k)
        scores = random.normal(*shape).mul(2).round() - 3
        scores[random.normal(*shape).abs() < nan] = float("nan")
        made.append(Top(scores, random.order(shape[0] * k).view(shape)))
    return made


def grown(trees: Trees, tops: list[Top], device: torch.device | None) -> tuple[Pool, Beam | None]:
    n, k = tops[0].logprobs_RK.shape
    pool, beam = Pool.empty(n, k + (len(tops) - 1) * k * k, device), None
    for top in tops:
        beam = trees.expand(pool, top, beam)
    return pool, beam


def choosing(ops: CudaOps, random: Random) -> float:
    """Levels, and the nodes that are chosen of them."""
    trees, errors = CudaTrees(ops), []
    for n, k, depth, nan in ((1, 1, 1, 0.0), (3, 4, 4, 0.1), (5, 8, 7, 0.0), (2, 3, 5, 9.0)):
        tops = levels(random, n, k, depth, nan=nan)
        mine, beam = grown(trees, [here(random, top) for top in tops], ops.device)
        twin, twin_beam = grown(TWIN, tops, None)
        errors += [differs(mine, twin), differs(beam, twin_beam)]
        for budget in (0, 1, 7, 63, mine.count):
            budgets = [max(0, budget - one) for one in range(n)]
            errors.append(differs(trees.select(mine, budgets), TWIN.select(twin, budgets)))
    return max(errors)


def likeliest(ops: CudaOps, random: Random) -> float:
    trees, errors = CudaTrees(ops), []
    for vocab, k in ((9, 9), (1003, 1), (49152, 10)):
        logits = random.normal(6, vocab) * 3
        logits[1] = logits[1].round()
        logits[2, 5:] = -FAR
        logits[3, 7], logits[4], logits[5, 0] = float("nan"), -FAR, FAR
        got, wanted = trees.top(random.here(logits), k), TWIN.top(logits, k)
        errors.append(same(got.tokens_RK, wanted.tokens_RK))
        mine, twins = got.logprobs_RK.cpu(), wanted.logprobs_RK
        finite = twins.isfinite()
        errors.append(close(mine[finite], twins[finite], 1e-6, 1e-6))
        errors.append(same(mine[~finite].nan_to_num(1), twins[~finite].nan_to_num(1)))
    return max(errors)


def noisy(ops: CudaOps, random: Random) -> float:
    trees, errors = CudaTrees(ops), []
    for m, k in ((1, 1), (64, 8), (1000, 1000)):
        logits = random.normal(6, 1000) * 3
        top = TWIN.top(logits, m)
        noise = Noise(torch.arange(6) - 3, random.order(6), torch.tensor([0, 0.3, 0.7, 1, 1.5, 2]))
        there = Noise(random.here(noise.seeds_R), random.here(noise.positions_R),
                      random.here(noise.temperatures_R))  # fmt: skip
        got, wanted = (
            trees.under_noise(here(random, top), there, k),
            TWIN.under_noise(top, noise, k),
        )
        errors.append(same(got.tokens_RK, wanted.tokens_RK))
        errors.append(close(got.logprobs_RK, wanted.logprobs_RK, 1e-5, 1e-5))
    return max(errors)


def walking(ops: CudaOps, random: Random) -> float:
    """Layout, paths, what draws keep, and where its KV goes."""
    trees, sizes = CudaTrees(ops), [0, 1, 40, 17, 64, 130]
    starts = [0, *itertools.accumulate(sizes)]
    order = [random.order(1000).tolist() for _ in range(3)]
    parents = [-1 if row == 0 else order[0][row + n] % row for n, size in enumerate(sizes)
               for row in range(size)]  # fmt: skip
    tokens = torch.tensor([[one % 2 for one in some[: starts[-1]]] for some in order[1:]]).int()
    tokens[1, 5::17] = -1
    slots = random.order(starts[-1] + 4)[: starts[-1]]
    starts_M, parents_T = torch.tensor(starts).int(), torch.tensor(parents).int()
    positions_N = random.order(len(sizes))
    rows = [random.here(x) for x in (starts_M, parents_T)]
    errors = [
        differs(trees.lay_out(*rows, random.here(positions_N)),
                TWIN.lay_out(starts_M, parents_T, positions_N)),
        differs(trees.paths(*rows), TWIN.paths(starts_M, parents_T)),
    ]  # fmt: skip
    got = trees.accept(*rows, *(random.here(x) for x in (*tokens, slots)))
    errors.append(differs(got, TWIN.accept(starts_M, parents_T, *tokens, slots)))
    moves = starts_M, got.from_slots_T, got.to_slots_T
    for dtype, dim in ((torch.float32, 64), (torch.bfloat16, 3), (torch.int8, 68), (torch.int8, 5)):
        wide = (random.normal(64, 3, 2, 4, 2, dim) * 40).to(dtype)
        there = random.here(wide.clone())
        mine, twins = ([KvLayer(*x[:, layer].unbind(1)) for layer in range(3)]
                       for x in (there, wide))  # fmt: skip
        trees.compact(mine, *(random.here(x) for x in moves))
        TWIN.compact(twins, *(x.cpu() for x in moves))
        errors.append(same(there, wide))
    return max(errors)


CASES: dict[str, Case] = {
    "tree levels, choice": choosing,
    "tree top": likeliest,
    "tree noise": noisy,
    "tree layout, walk, moves": walking,
}
