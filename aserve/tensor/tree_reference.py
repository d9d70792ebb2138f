"""The plain twin of the trees' kernels: a few lines each, one tree after the other."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.core.noise import draw_key, token_bits, uniform
from aserve.core.tree import depths
from aserve.tensor.ops import KvLayer, Tree, paths_of, tree_of
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

Key = tuple[bool, float]

TEMPERATURE_MIN = 1e-5


def key_of(score: float) -> Key:
    """In the order of scores, NaN before all numbers."""
    is_number = not math.isnan(score)
    return is_number, score if is_number else 0.0


def best_of(keys: Sequence[Key], n: int) -> list[int]:
    """The places of the `n` best, best first; of equals the first."""
    return sorted(range(len(keys)), key=lambda place: keys[place], reverse=True)[:n]


class ReferenceTrees:
    def top(self, logits_RV: Tensor, k: int) -> Top:
        vocab = logits_RV.shape[1]
        if not 1 <= k <= vocab:
            raise ValueError(f"{k} of {vocab} tokens")
        logprobs_RV = logits_RV.double().log_softmax(-1)
        tokens_RK = logits_RV.argsort(dim=-1, descending=True, stable=True)[:, :k].clone()
        scores_RK = logprobs_RV.gather(1, tokens_RK)
        # A row with +inf, NaN or nothing finite is NaN throughout.
        none_RK = ~scores_RK.isfinite()
        tokens_RK[none_RK] = torch.arange(k).expand_as(tokens_RK)[none_RK]
        return Top(scores_RK.float(), tokens_RK.int())

    def under_noise(self, top: Top, noise: Noise, k: int) -> Top:
        noise_shape(top, noise, k)
        scores, tokens = [], []
        for row, temperature in enumerate(noise.temperatures_R.tolist()):
            logprobs_M, tokens_M = top.logprobs_RK[row], top.tokens_RK[row]
            if temperature >= TEMPERATURE_MIN:
                seed, position = int(noise.seeds_R[row]), int(noise.positions_R[row])
                bits = [token_bits(draw_key(seed, position), one) for one in tokens_M.tolist()]
                noise_M = [-math.log(-math.log(uniform(one))) for one in bits]
                noisy_M = logprobs_M.double() / temperature + torch.tensor(
                    noise_M, dtype=torch.float64
                )
                order = best_of([key_of(score) for score in noisy_M.tolist()], k)
                logprobs_M, tokens_M = noisy_M.log_softmax(0)[order], tokens_M[order]
            scores.append(logprobs_M[:k].float())
            tokens.append(tokens_M[:k])
        none = torch.empty(0, k)
        return Top(torch.stack(scores), torch.stack(tokens)) if scores else Top(none, none.int())

    def expand(self, pool: Pool, top: Top, beam: Beam | None = None, width: int = 0) -> Beam:
        beams, k = children_of(pool, top, beam)
        width = require_room(pool, beams * k, width or k)
        begin, places, rows = pool.count, [], []
        for n in range(pool.trees):
            of_level = range(begin, begin + beams * k)
            children = itertools.product(range(beams), range(k))
            for place, (b, j) in zip(of_level, children, strict=True):
                row = n * beams + b
                parent = -1 if beam is None else int(beam.places_NW[n, b])
                before = torch.zeros(()) if parent < 0 else pool.scores_NC[n, parent]
                pool.scores_NC[n, place] = before + top.logprobs_RK[row, j]
                pool.tokens_NC[n, place] = top.tokens_RK[row, j]
                pool.parents_NC[n, place] = parent
            keys = [key_of(score) for score in pool.scores_NC[n, of_level].tolist()]
            best = best_of(keys, width)
            places.append([begin + place for place in best])
            rows.append([n * beams + place // k for place in best])
        pool.count += beams * k
        places_NW = torch.tensor(places, dtype=torch.int32).view(pool.trees, width)
        tokens_NW = pool.tokens_NC.gather(1, places_NW.long())
        return Beam(places_NW, tokens_NW, torch.tensor(rows, dtype=torch.int32).view_as(places_NW))

    def select(self, pool: Pool, budgets: Sequence[int]) -> Drafts:
        starts = budgets_of(pool, budgets)
        tokens: list[int] = []
        parents: list[int] = []
        scores: list[float] = []
        for n, (begin, end) in enumerate(itertools.pairwise(starts)):
            of_tree = pool.parents_NC[n, : pool.count].tolist()
            require_before(of_tree)
            given = pool.scores_NC[n, : pool.count].tolist()
            keys: list[Key] = []
            for score, parent in zip(given, of_tree, strict=True):
                key = key_of(score)
                keys.append(key if parent < 0 else min(key, keys[parent]))
            chosen = sorted(best_of(keys, end - begin))
            numbers = {-1: -1} | {place: number for number, place in enumerate(chosen)}
            tokens += pool.tokens_NC[n, chosen].tolist()
            parents += [numbers[of_tree[place]] for place in chosen]
            scores += [given[place] for place in chosen]
        return Drafts(starts, ints(tokens), ints(parents), torch.tensor(scores))

    def lay_out(self, row_start_M: Tensor, parents_T: Tensor, starts_N: Tensor) -> Layout:
        spans = spans_of(row_start_M)
        words = max([1, *(-(-(end - begin) // MASK_BITS) for begin, end in spans)])
        positions: list[int] = []
        children: list[int] = []
        siblings: list[int] = []
        mask_TW = torch.zeros(len(parents_T), words, dtype=torch.int64)
        for (begin, end), start in zip(spans, starts_N.tolist(), strict=True):
            parents = parents_T[begin:end].tolist()
            require_before(parents)
            positions += [start + depth for depth in depths(parents)]
            for row, path in enumerate(paths_of(parents)):
                for at in path:
                    bit = 1 << at % MASK_BITS
                    signed = bit - (1 << MASK_BITS) if at % MASK_BITS == MASK_BITS - 1 else bit
                    mask_TW[begin + row, at // MASK_BITS] |= signed
                below = [child for child, parent in enumerate(parents) if parent == row]
                children.append(below[0] if below else -1)
                after = range(row + 1, len(parents)) if parents[row] >= 0 else ()
                beside = [other for other in after if parents[other] == parents[row]]
                siblings.append(beside[0] if beside else -1)
        return Layout(ints(positions), mask_TW, ints(children), ints(siblings))

    def paths(self, row_start_M: Tensor, parents_T: Tensor) -> Tree:
        paths: list[list[int]] = []
        for begin, end in spans_of(row_start_M):
            parents = parents_T[begin:end].tolist()
            require_before(parents)
            is_chain = parents == list(range(-1, len(parents) - 1))
            paths += [[]] * len(parents) if is_chain else paths_of(parents)
        return tree_of(paths)

    def accept(
        self,
        row_start_M: Tensor,
        parents_T: Tensor,
        tokens_T: Tensor,
        drawn_T: Tensor,
        slots_T: Tensor | None = None,
    ) -> Accepted:
        spans = spans_of(row_start_M)
        path_T, kept_T, from_T, to_T = torch.full((4, len(parents_T)), -1, dtype=torch.int32)
        lengths, following = [], []
        for begin, end in spans:
            parents, tokens, drawn = (x[begin:end].tolist() for x in (parents_T, tokens_T, drawn_T))
            path = [0] if parents else []
            while path:
                last = path[-1]
                below = [row for row, parent in enumerate(parents) if parent == last and row > last]
                agreed = [row for row in below if tokens[row] == drawn[last] and drawn[row] >= 0]
                if not agreed:
                    break
                path.append(agreed[0])
            kept = [drawn[row] for row in path]
            lengths.append(len(path))
            following.append(kept[-1] if kept else -1)
            path_T[begin : begin + len(path)] = ints(path)
            kept_T[begin : begin + len(path)] = ints(kept)
            for depth, row in enumerate(path):
                if slots_T is not None and row != depth:
                    from_T[begin + depth] = slots_T[begin + row]
                    to_T[begin + depth] = slots_T[begin + depth]
        moves = (None, None) if slots_T is None else (from_T, to_T)
        return Accepted(path_T, kept_T, ints(lengths), ints(following), *moves)

    def compact(
        self, layers: Sequence[KvLayer], starts_M: Tensor, slots_from: Tensor, slots_to: Tensor
    ) -> None:
        for layer in layers:
            for pool in (layer.k_PSHD, layer.v_PSHD):
                for source, to in zip(slots_from.tolist(), slots_to.tolist(), strict=True):
                    if (source, to) == (-1, -1):
                        continue
                    places = [divmod(slot, pool.shape[1]) for slot in (source, to)]
                    pool[places[1]] = pool[places[0]].clone()


def spans_of(row_start_M: Tensor) -> list[tuple[int, int]]:
    return list(itertools.pairwise(row_start_M.tolist()))


def require_before(parents: Sequence[int]) -> None:
    if not all(-1 <= parent < at for at, parent in enumerate(parents)):
        raise ValueError("a parent is not before its child")


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
