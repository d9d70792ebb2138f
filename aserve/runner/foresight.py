"""What is likeliest to come next: by a drafter's logits, under the noise of the target's draws."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from aserve.core.message import Sampling
from aserve.core.noise import U64
from aserve.runner.growing import Ints, spread
from aserve.tensor.tree import Noise, Top, Trees

GREEDY_BELOW = 1e-5  # a temperature, as in sampling
CANDIDATES = 32  # among which noise chooses: it may lift what is not likely


class Foresight:
    """The likeliest children of the rows of drafts, level by level: where the target draws with
    noise, under its noise, so that what is proposed first is what would be drawn."""

    def __init__(
        self, trees: Trees, samplings: Sequence[Sampling], positions_N: Ints, width: int
    ) -> None:
        """`positions_N` are those of the first tokens below the roots."""
        self._trees, self._width, self._level = trees, width, 0
        temperatures = [one.temperature for one in samplings]
        self._noise: Noise | None = None
        if max(temperatures) >= GREEDY_BELOW:
            seeds_N = np.array([one.seed & U64 for one in samplings], dtype=np.uint64)
            self._noise = Noise(
                torch.from_numpy(seeds_N.view(np.int64)),
                torch.from_numpy(positions_N),
                torch.tensor(temperatures),
            )

    def top(self, logits_RV: Tensor, ids_V: Tensor | None = None) -> Top:
        """What may follow the rows of the next level, in tokens of the target: `ids_V` (int32) are
        those of a drafter with a vocabulary of its own."""
        noise, width = self._noise, self._width
        vocab = logits_RV.shape[1]
        count = width if noise is None else min(vocab, max(width, CANDIDATES))
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
