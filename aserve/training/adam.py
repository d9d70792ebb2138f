"""AdamW over a dict of tensors. torch.optim would bring a compiler along, seconds of loading."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

BETA_MEAN, BETA_SQUARE = 0.9, 0.95
EPS = 1e-8
WEIGHT_DECAY = 0.01
GRADIENT_MAX = 1.0


class Adam:
    """Loshchilov & Hutter 2019; gradients are first scaled to a norm of `GRADIENT_MAX` at most.
    Vectors scale, and decay would pull them to nothing, so it is for matrices."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights
        self.means = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.squares = {name: torch.zeros_like(w) for name, w in weights.items()}

    @torch.no_grad()
    def step(self, rate: float, number: int) -> None:
        """The `number`-th, from 1 on. Takes the gradients."""
        gradients = {name: w.grad for name, w in self.weights.items() if w.grad is not None}
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        scale = min(1.0, GRADIENT_MAX / (norm + 1e-6))
        size = rate / (1 - BETA_MEAN**number)
        correction = 1 - BETA_SQUARE**number
        for name, gradient in gradients.items():
            w, mean, square = self.weights[name], self.means[name], self.squares[name]
            gradient.mul_(scale)
            if w.ndim > 1:
                w.mul_(1 - rate * WEIGHT_DECAY)
            mean.lerp_(gradient, 1 - BETA_MEAN)
            square.mul_(BETA_SQUARE).addcmul_(gradient, gradient, value=1 - BETA_SQUARE)
            w.addcdiv_(mean, (square / correction).sqrt_().add_(EPS), value=-size)
            w.grad = None
