"""A second, smaller model of the same tokenizer drafts what the first one then verifies (Leviathan
et al. 2023; Chen et al. 2023).

It is whole at the rank that drafts, and keeps the KV of a text in the slots of its sequence's
pages, in pools of its own. Rows that come while nobody wants a draft wait until somebody does,
chunks of prompts excepted: a model that is switched off costs next to nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from aserve.core.config import Accept, Layout
from aserve.core.layout import Grid
from aserve.core.message import Drafting
from aserve.core.tree import NO_DRAFT, Draft
from aserve.models.registry import Model
from aserve.runner.drafter import Kept
from aserve.runner.foresight import Foresight, noise_of
from aserve.runner.growing import Ints, Scratch, grow
from aserve.runner.inputs import PageTables
from aserve.tensor.ops import Attend, KvLayer
from aserve.tensor.tokens import Seat, Tokens
from aserve.tensor.tree import Beam, Top, trees_of

# Rows of text that were left out and are made up for, in one step: no stream waits for another's.
CATCH_UP_MAX = 512


@dataclasses.dataclass(slots=True)
class Text:
    """Of one sequence: `ids` are the tokens from position `kv_len` on, up to which there is KV."""

    kv_len: int
    ids: list[int]

    @property
    def end(self) -> int:
        """The position of the last known token: a draft comes below it."""
        return self.kv_len + len(self.ids) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """One sequence's rows of a step: positions [text.kv_len, end), and if it `grows` the last known
    token, at `end`, which is the root of a draft and no text yet."""

    one: Kept
    text: Text
    end: int
    grows: bool

    @property
    def stop(self) -> int:
        return self.end + self.grows


class Filled:
    """How many leading slots of each page hold KV of the tokens that the target has there now.

    So a page that the cache had is good, if its writer drafted; else its KV is made again, in
    place: the same tokens give the same.
    """

    def __init__(self, n_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._lens = [0] * n_pages

    def prefix_len(self, pages: Sequence[int], end: int) -> int:
        """Of the whole pages up to `end`: how many tokens from the first on have KV."""
        size, lens = self._page_size, self._lens
        whole = end // size
        return size * next((at for at in range(whole) if lens[pages[at]] < size), whole)

    def overwrite(self, pages: Sequence[int], start: int, end: int) -> None:
        """Other tokens stand at positions [start, end) now."""
        size, lens = self._page_size, self._lens
        first = start // size
        lens[pages[first]] = min(lens[pages[first]], start - first * size)
        for place in range(first + 1, -(-end // size)):
            lens[pages[place]] = 0

    def fill(self, pages: Sequence[int], start: int, end: int) -> None:
        """What was missing at [start, end) is there."""
        size, lens = self._page_size, self._lens
        for place in range(start // size, -(-end // size)):
            lens[pages[place]] = min(size, end - place * size)


class ModelDrafter:
    """`Drafter` by a model. Pages of its KV have the target's numbers."""

    def __init__(
        self,
        model: Model,
        kv: Sequence[KvLayer],
        scratch: Scratch,
        target_vocab: int,
        accept: Accept,
    ) -> None:
        self._model, self._layers, self._scratch = model, kv, scratch
        self._trees, self._accept = trees_of(model.ops), accept
        self._seat = Seat(Grid(Layout()), 0, None, model.ops)
        self._vocab = min(target_vocab, model.spec.vocab)
        self._has_all = model.spec.vocab >= target_vocab
        self._tables = PageTables(scratch.page_size)
        self._filled = Filled(scratch.pages_before, scratch.page_size)
        self._texts: dict[int, Text] = {}

    def drop(self, seq: int) -> None:
        self._texts.pop(seq, None)
        self._tables.drop(seq)

    @torch.inference_mode()
    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        """See `Drafter`."""
        found = [NO_DRAFT] * len(kept)
        lanes = self._lanes(kept, drafting)
        if not lanes:
            return found
        read = Reading(list(lanes.values()), self._tables, self._scratch)
        hidden_TH = self._forward(torch.tensor(read.ids), read.attend)
        for lane in lanes.values():
            self._settle(lane)
        if read.growing:
            places = list(lanes)
            drafts = self._grow(read, hidden_TH[read.roots], drafting)
            for n, draft in zip(read.growing, drafts, strict=True):
                found[places[n]] = draft
        return found

    def _lanes(self, kept: Sequence[Kept], drafting: Drafting) -> dict[int, Lane]:
        """By the place in `kept`, where there is something to do."""
        lanes: dict[int, Lane] = {}
        spare = CATCH_UP_MAX
        for place, one in enumerate(kept):
            text, view = self._brought_up(one), one.view
            is_chunk = view.n_rows > 1 and not view.rows.parents
            wanted = one.is_drawn and drafting.tokens > 0
            # Beyond what the model was made for it keeps silent.
            fits = text.end + drafting.depth < self._model.spec.context_len
            if not ((wanted or is_chunk) and fits):
                continue
            late = max(0, view.start - text.kv_len)
            left_out = max(0, late - spare)
            spare -= late - left_out
            end = view.start - left_out if left_out else text.end
            if end > text.kv_len:
                lanes[place] = Lane(one, text, end, wanted and not left_out)
        return lanes

    def _brought_up(self, one: Kept) -> Text:
        """The text up to the last of `one.tokens`. The state may be ahead of it, or behind."""
        view, seq = one.view, one.view.rows.seq
        pages, known = view.state.pages, view.state.tokens
        text = self._texts.get(seq)
        if text is None:
            kv_len = self._filled.prefix_len(pages, view.start)
            text = self._texts[seq] = Text(kv_len, known[kv_len : view.start + 1])
        assert text.end == view.start, (seq, text.end, view.start)
        self._filled.overwrite(pages, view.start, view.start + len(one.path))
        text.ids += one.tokens
        return text

    def _settle(self, lane: Lane) -> None:
        """The KV of its text is there."""
        text = lane.text
        self._filled.fill(lane.one.view.state.pages, text.kv_len, lane.end)
        del text.ids[: lane.end - text.kv_len]
        text.kv_len = lane.end

    def _grow(self, read: "Reading", roots_NH: Tensor, drafting: Drafting) -> list[Draft]:
        width = min(drafting.topk, self._vocab)
        noise = noise_of(self._accept, read.samplings, read.lengths_N)
        foresight = Foresight(self._trees, noise, width)
        below = self._scratch.below(read.table_NP[read.growing], read.lengths_N)

        def after(beam: Beam, attend: Attend) -> Top:
            hidden_RH = self._forward(beam.tokens_NW.flatten().long(), attend)
            return foresight.top(self._logits(hidden_RH))

        top = foresight.top(self._logits(roots_NH))
        return grow(self._trees, top, below, drafting, after)

    def _forward(self, ids_T: Tensor, attend: Attend) -> Tensor:
        if not self._has_all:  # a row of the target's table that is no token
            ids_T = ids_T.clamp_max(self._vocab - 1)
        tokens = Tokens(self._seat, [[len(ids_T)]])
        return self._model.forward(ids_T, tokens, self._layers, attend)

    def _logits(self, hidden_RH: Tensor) -> Tensor:
        logits_RV = self._model.logits(hidden_RH, (len(hidden_RH),), self._seat)
        return logits_RV[:, : self._vocab]


class Reading:
    """The rows of all lanes, one after the other. Those in `growing` end with their root, at the
    row in `roots`, behind whose `lengths_N` tokens with KV a draft comes."""

    __slots__ = ("attend", "growing", "ids", "lengths_N", "roots", "samplings", "table_NP")

    def __init__(self, lanes: Sequence[Lane], tables: PageTables, scratch: Scratch) -> None:
        size = tables.page_size
        self.ids: list[int] = []
        positions: list[int] = []
        counts = [lane.stop - lane.text.kv_len for lane in lanes]
        for lane, count in zip(lanes, counts, strict=True):
            self.ids += lane.text.ids[:count]
            positions += range(lane.text.kv_len, lane.stop)
        stops = [lane.stop for lane in lanes]
        states = [lane.one.view.state for lane in lanes]
        lines = [tables.update(state.seq, state.pages) for state in states]
        stop_N, lines_N = np.array([stops, lines], dtype=np.int32)
        self.table_NP: Ints = tables.gather(lines_N, max(stops) // size + 1)
        self.growing = [n for n, lane in enumerate(lanes) if lane.grows]
        for place, n in enumerate(self.growing):
            if lanes[n].end % size == 0:  # the root's page is not the sequence's yet
                self.table_NP[n, lanes[n].end // size] = scratch.last_page(place)
        starts = list(accumulate(counts, initial=0))
        self.roots = [starts[n + 1] - 1 for n in self.growing]
        self.lengths_N = stop_N[self.growing]
        self.samplings = [states[n].sampling for n in self.growing]
        positions_T = np.array(positions, dtype=np.int32)
        pages_T = self.table_NP[np.repeat(np.arange(len(lanes)), counts), positions_T // size]
        self.attend = Attend(
            slots_T=torch.from_numpy(pages_T * size + positions_T % size),
            positions_T=torch.from_numpy(positions_T),
            page_table_NP=torch.from_numpy(self.table_NP),
            row_start_M=torch.tensor(starts, dtype=torch.int32),
            kv_len_N=torch.from_numpy(stop_N),
        )
