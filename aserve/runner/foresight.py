"""What is likeliest to come next: by a drafter's logits, under the noise of the target's draws.

A drafter that knows the noise proposes what will be drawn, as far as its logits are the target's.
One that does not makes of the same draws rejection sampling (Leviathan et al. 2023; over siblings,
Miao et al. 2024): its proposal is one token, which is accepted with the probability that the target
gives it, then the next sibling with its share of the rest; else the token is drawn from what is
left. One draw that is compared with all siblings comes to just that, and needs no second noise.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.core.config import Accept
from aserve.core.message import Sampling
from aserve.core.noise import U64
from aserve.runner.growing import Ints, spread
from aserve.tensor.tree import Noise, Top, Trees

GREEDY_BELOW = 1e-5  # a temperature, as in sampling
CANDIDATES = 32  # among which noise chooses: it may lift what is not likely


def noise_of(accept: Accept, samplings: Sequence[Sampling], positions_N: Ints) -> Noise | None:
    """What a draft may know of the noise of the first draws below its root; None: nothing, or there
    is none."""
    temperatures = [one.temperature for one in samplings]
    if accept == "rejection" or max(temperatures) < GREEDY_BELOW:
        return None
    seeds_N = np.array([one.seed & U64 for one in samplings], dtype=np.uint64)
    return Noise(
        torch.from_numpy(seeds_N.view(np.int64)),
        torch.from_numpy(positions_N),
        torch.tensor(temperatures),
    )


class Foresight:
    """The likeliest children of the rows of drafts, level by level, the likeliest to be drawn
    first."""

    def __init__(self, trees: Trees, noise: Noise | None, width: int) -> None:
        self._trees, self._noise, self._width, self._level = trees, noise, width, 0

    def top(self, logits_RV: Tensor, ids_V: Tensor | None = None) -> Top:
        """What may follow the rows of the next level, in tokens of the target: `ids_V` (int32) are
        those of a drafter with a vocabulary of its own."""
        noise, width = self._noise, self._width
        vocab = logits_RV.shape[1]
        count = width if noise is None else candidates(vocab, width)
        top = self._trees.top(logits_RV, count)
        if ids_V is not None:
            top = Top(top.logprobs_RK, ids_V[top.tokens_RK])
        if noise is None:
            return top
        each = len(logits_RV) // len(noise.seeds_R)
        here = Noise(
            spread(noise.seeds_R, each),
            spread(noise.positions_R + self._level, each),
            spread(noise.temperatures_R, each),
        )
        self._level += 1
        return self._trees.under_noise(top, here, width)


def candidates(vocab: int, width: int) -> int:
    """Among how many of the likeliest noise chooses `width`."""
    return min(vocab, max(width, CANDIDATES))
