"""Memory for what native calls return: got without giving up the interpreter, as torch does, to
wait for it; and the same again where it is large, so that its pages are there already."""

import math
import sys

import numpy as np
import torch
from torch import Tensor

LARGE = 1 << 18  # float32 from which memory is kept
UNUSED = 3  # references: the attribute, whoever asks (two threads: neither gets it), and the count


class Outputs:
    """Keeps the last large memory, and gives it again once no tensor lies in it any more."""

    def __init__(self) -> None:
        self._kept = np.empty(0, dtype=np.float32)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Contiguous, of any values."""
        if dtype is not torch.float32:
            return torch.empty(shape, dtype=dtype)
        n = math.prod(shape)
        if n < LARGE:
            return torch.from_numpy(np.empty(shape, dtype=np.float32))
        kept = self._kept
        if len(kept) < n or sys.getrefcount(kept) > UNUSED:
            kept = self._kept = np.empty(n, dtype=np.float32)
        return torch.from_numpy(kept[:n].reshape(shape))
