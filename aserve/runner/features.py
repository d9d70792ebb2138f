"""What a drafter sees of the target's rows, on its way to the leaders of the last stage.

Rows that entered a captured layer ride beside the hidden rows from stage to stage, each rank
sending its slice; context parallelism cut them, so its ranks put them together again.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from aserve.models.decoder import HIDDEN, Model, feature_of
from aserve.tensor.tokens import Tokens

Shapes: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Features:
    """Of one rank; `model.features` says which, the same on all ranks."""

    def __init__(self, model: Model) -> None:
        self._names, self._width = model.features, model.spec.hidden
        self._is_last = model.is_last
        stage, captured = model.stage, model.captured
        self._before = [feature_of(layer) for layer in captured if layer < stage.start]
        self._here = [layer for layer in captured if layer in stage]

    def inward(self, n_rows: int) -> Shapes:
        """What the stage before sends of so many rows."""
        return {name: ((n_rows, self._width), torch.float32) for name in (HIDDEN, *self._before)}

    def outward(
        self,
        tokens: Tokens,
        hidden_TH: Tensor,
        seen: Mapping[int, Tensor],
        inward: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """What goes to the next stage; `seen` as `Model.forward` leaves it."""
        found = {name: inward[name] for name in self._before}
        found |= {feature_of(layer): tokens.slice(seen[layer]) for layer in self._here}
        return {HIDDEN: tokens.slice(hidden_TH), **found}

    def nothing(self) -> dict[str, Tensor]:
        """The same of a step without rows."""
        names = (HIDDEN, *self._before, *map(feature_of, self._here))
        return {name: torch.empty(0, self._width) for name in names}

    def of_group(
        self,
        tokens: Tokens,
        hidden_TH: Tensor,
        seen: Mapping[int, Tensor],
        inward: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """float32 [rows of this rank's DP group, hidden] each, in the plan's order; for the last
        stage, every rank of which takes part."""
        assert self._is_last
        found = {feature_of(layer): seen[layer] for layer in self._here}
        found |= {name: tokens.join(inward[name]) for name in self._before}
        found[HIDDEN] = hidden_TH
        return {name: tokens.whole_group(found[name]) for name in self._names}
