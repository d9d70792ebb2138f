"""Sequences over shuffled pages, driven by hand: what the runner does, in its plainest form."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aserve.models.decoder import Model
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.tokens import Seat, Tokens

PAGES, PAGE_SIZE = 64, 4


class Paged:
    """Feeds rows of any number of sequences, in chunks of any size, to one model."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        (region,) = model.regions()
        generator = torch.Generator().manual_seed(seed)
        shape = (PAGES, PAGE_SIZE, region.heads, region.head_dim)
        # A page that is read before it is written shows in the logits.
        self.kv = [
            KvLayer(*(torch.full(shape, torch.nan, dtype=region.dtype) for _ in range(2)))
            for _ in region.layers
        ]
        self.model = model
        self.seat = Seat(model.grid, model.rank)
        self.free = torch.randperm(PAGES, generator=generator).tolist()
        self.pages: dict[int, list[int]] = {}
        self.kv_len: dict[int, int] = {}

    @torch.inference_mode()
    def step(self, *rows: tuple[int, Sequence[int]]) -> list[Tensor]:
        """Run (sequence, tokens) rows together; the logits of each sequence's rows."""
        hidden = self.forward(*rows)
        logits = self.model.logits(hidden, (len(hidden),), self.seat)
        return list(logits.split([len(chunk) for _, chunk in rows]))

    def forward(self, *rows: tuple[int, Sequence[int]], hidden: Tensor | None = None) -> Tensor:
        ids = torch.tensor([token for _, chunk in rows for token in chunk], dtype=torch.int64)
        tokens = Tokens(self.seat, [[len(chunk) for _, chunk in rows]])
        return self.model.forward(ids, tokens, self.kv, self.attend(rows), hidden)

    def attend(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Attend:
        slots, positions, starts, kv_lens = [], [], [0], []
        for seq, chunk in rows:
            pages, start = self.pages.setdefault(seq, []), self.kv_len.get(seq, 0)
            stop = start + len(chunk)
            while len(pages) * PAGE_SIZE < stop:
                pages.append(self.free.pop())
            for at in range(start, stop):
                slots.append(pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE)
                positions.append(at)
            self.kv_len[seq] = stop
            starts.append(starts[-1] + len(chunk))
            kv_lens.append(stop)
        tables = [self.pages[seq] for seq, _ in rows]
        width = max(map(len, tables))
        padded = [table + [0] * (width - len(table)) for table in tables]
        made = (slots, positions, padded, starts, kv_lens)
        return Attend(*(torch.tensor(values, dtype=torch.int32) for values in made))

    def greedy(self, tokens: list[int], new_len: int, seq: int = 0) -> list[int]:
        logits = self.step((seq, tokens))[0]
        out = [int(logits[-1].argmax())]
        while len(out) < new_len:
            out.append(int(self.step((seq, out[-1:]))[0][-1].argmax()))
        return out
