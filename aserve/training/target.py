"""What the target makes of whole conversations: features for a head, its last rows, its choices.

By the engine's own operations, so that a head learns from what it will be served, whatever family
the target is of. One pass a conversation, no sampling, nothing kept between calls.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.models.decoder import Model, Step
from aserve.models.eagle_loading import shared_with
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.tokens import Seat, Tokens

PAGE_SIZE = 16
ROWS_MAX = 4096  # that go through the target together
HEAD_ROWS = 512  # of which logits over the whole vocabulary are held at once


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """Of the tokens of one conversation or several, one after the other.

    `features_TF` bfloat16, what `DraftHead.start` takes; `hidden_TH` bfloat16, after the final
    norm; `best_T` int32, the likeliest next token.
    """

    features_TF: Tensor
    hidden_TH: Tensor
    best_T: Tensor


class Target:
    """`captured` as in `HeadSpec`."""

    def __init__(self, model: Model, captured: Sequence[int]) -> None:
        self.model, self.captured = model, tuple(captured)
        self.shared = shared_with(model)
        self.seat = Seat(model.grid, model.rank, None, model.ops)
        (self._region,) = model.regions()

    @torch.inference_mode()
    def read(self, conversations: Sequence[Sequence[int]]) -> Seen:
        """Of all of them, in order."""
        batches: list[list[Sequence[int]]] = [[]]
        for tokens in conversations:
            if sum(map(len, batches[-1])) + len(tokens) > ROWS_MAX and batches[-1]:
                batches.append([])
            batches[-1].append(tokens)
        parts = [self._pass(batch) for batch in batches]
        return Seen(
            torch.cat([part.features_TF for part in parts]),
            torch.cat([part.hidden_TH for part in parts]),
            torch.cat([part.best_T for part in parts]),
        )

    def _pass(self, batch: Sequence[Sequence[int]]) -> Seen:
        model, ops = self.model, self.model.ops
        ids_T = torch.tensor([int(token) for tokens in batch for token in tokens])
        lengths = [len(tokens) for tokens in batch]
        attend, pages = whole_sequences(lengths)
        step = Step(Tokens(self.seat, [lengths]), attend, model.rotary.upto(max(lengths)))
        # A layer reads what it wrote in this very pass, so all of them may use the same pages.
        kv = self._pages(pages)
        x_TH, added_TH = ops.embed(self.shared.table, ids_T), None
        features: dict[int, Tensor] = {}
        for number, layer in enumerate(model.layers):
            if number in self.captured:
                entering = x_TH if added_TH is None else ops.add(x_TH, added_TH)
                features[number] = entering.bfloat16()
            x_TH, added_TH = layer(x_TH, added_TH, kv, step)
        hidden_TH = model.finish(x_TH, added_TH)
        best = [
            ops.linear(rows, model.head).argmax(-1).to(torch.int32)
            for rows in hidden_TH.split(HEAD_ROWS)
        ]
        hidden = hidden_TH.bfloat16()
        side_by_side = [features[number] for number in self.captured] or [hidden]
        return Seen(torch.cat(side_by_side, dim=1), hidden, torch.cat(best))

    def _pages(self, count: int) -> KvLayer:
        shape = (count, PAGE_SIZE, self._region.heads, self._region.head_dim)
        k, v = (torch.zeros(shape, dtype=self._region.dtype) for _ in range(2))
        return KvLayer(k, v)


def whole_sequences(lengths: Sequence[int]) -> tuple[Attend, int]:
    """(all rows of so many sequences, how many pages they take)."""
    pages = [-(-length // PAGE_SIZE) for length in lengths]
    tables = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    slots, first = [], 0
    for n, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        tables[n, :count] = torch.arange(first, first + count, dtype=torch.int32)
        slots.append(torch.arange(length, dtype=torch.int32) + first * PAGE_SIZE)
        first += count
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    attend = Attend(
        slots_T=torch.cat(slots),
        positions_T=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        page_table_NP=tables,
        row_start_M=ends,
        kv_len_N=torch.tensor(lengths, dtype=torch.int32),
    )
    return attend, first
