"""Drafts by a head of the EAGLE family: every row that stays becomes a pair of the head's own KV,
and a tree grows below the last of those that were drawn from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aserve.core.config import Accept
from aserve.core.message import Drafting
from aserve.core.tree import NO_DRAFT, Draft
from aserve.models.decoder import HIDDEN, feature_of
from aserve.models.eagle_spec import DraftHead, HeadSpec
from aserve.models.regions import Region
from aserve.runner.drafter import Kept
from aserve.runner.foresight import Foresight, candidates, noise_of
from aserve.runner.growing import Scratch, grow, pages_below
from aserve.runner.inputs import PageTables
from aserve.runner.later import Later
from aserve.runner.pairs import Pairs
from aserve.tensor.blocks import DraftRoots
from aserve.tensor.ops import Attend, KvLayer, Ops
from aserve.tensor.tree import Beam, Top, Trees, trees_of


def features_of(spec: HeadSpec) -> tuple[str, ...]:
    """What a head takes of its target, in its order."""
    return tuple(map(feature_of, spec.captured)) or (HIDDEN,)


class EagleModel:
    """`DraftModel` of one head, whole, at the leader of a DP group.

    Pages of its KV have the target's numbers; those for drafts, of at most `sequences` at once,
    come after them.
    """

    def __init__(
        self,
        head: DraftHead,
        ops: Ops,
        most: Drafting,
        sequences: int,
        page_size: int,
        accept: Accept = "noise",
    ) -> None:
        self._accept: Accept = accept
        self._head, self._ops, self._page_size = head, ops, page_size
        self._each = pages_below(page_size, most)
        self.pages_beside = self._each * sequences

    def regions(self) -> tuple[Region, ...]:
        return self._head.regions()

    def drafter(self, kv: Sequence[KvLayer]) -> "EagleDrafter":
        first = len(kv[0].k_PSHD) - self.pages_beside
        scratch = Scratch(self._ops, kv, first, self._each, self._page_size)
        return EagleDrafter(self._head, trees_of(self._ops), kv, scratch, self._accept)


class EagleDrafter:
    """See `Drafter`."""

    def __init__(
        self,
        head: DraftHead,
        trees: Trees,
        kv: Sequence[KvLayer],
        scratch: Scratch,
        accept: Accept,
    ) -> None:
        self._accept: Accept = accept
        self._head, self._trees, self._layers, self._scratch = head, trees, kv, scratch
        self._tables = PageTables(scratch.page_size)
        self._later = Later()
        self._features = features_of(head.spec)
        drafted_V = torch.arange(head.spec.draft_vocab)
        ids_V = head.token_ids(drafted_V)
        self._ids_V = None if torch.equal(ids_V, drafted_V) else ids_V.to(torch.int32)

    def drop(self, seq: int) -> None:
        if seq in self._later.seqs:  # its pages may stay in the cache
            self._extend(*self._later.take(), [])
        self._later.forget(seq)
        self._tables.drop(seq)

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(kept)
        parts = [features[name] for name in self._features]
        if not kept or self._later.put(kept, parts, drafting):
            return drafts
        n_later = len(self._later.kept)
        whole, parts = self._later.taken_with(kept, parts)
        wanted = [n for n, one in enumerate(kept) if one.is_drawn] if drafting.tokens else []
        places = [n_later + n for n in wanted]
        pairs, ends = self._extend(whole, parts, places)
        if wanted:
            grown = self._grow([kept[n] for n in wanted], pairs, places, ends, drafting)
            for n, draft in zip(wanted, grown, strict=True):
                drafts[n] = draft
        return drafts

    def _extend(
        self, kept: Sequence[Kept], parts: Sequence[Tensor], wanted: Sequence[int]
    ) -> tuple[Pairs, tuple[Tensor, Tensor]]:
        """KV of all rows that stay; (hidden, logits) behind those of `wanted`."""
        pairs, head = Pairs(kept, self._tables), self._head
        hidden_TH = head.start(pairs.of_rows(parts))
        ends = pairs.ends(wanted)
        return pairs, head.draft(pairs.next_T, hidden_TH, self._layers, pairs.attend, ends)

    def _grow(
        self,
        roots: Sequence[Kept],
        pairs: Pairs,
        wanted: Sequence[int],
        ends: tuple[Tensor, Tensor],
        drafting: Drafting,
    ) -> list[Draft]:
        """Below `roots`, which are the `wanted` of `pairs`; `ends` are their last rows and what
        these foresee."""
        lengths_N = pairs.kv_len_N[list(wanted)]
        samplings = [one.view.state.sampling for one in roots]
        head, vocab = self._head, self._head.spec.draft_vocab
        width = min(drafting.topk, vocab)
        # The last tokens, just drawn, stand where the head's KV ends.
        noise = noise_of(self._accept, samplings, lengths_N + 1)
        if head.fused is not None:
            scratch = self._scratch
            table = torch.from_numpy(pairs.table_NP[list(wanted)])
            own = scratch.pages_before, scratch.pages_each
            lengths = torch.from_numpy(lengths_N)
            grown = DraftRoots(*ends, table, lengths, *own, noise, candidates(vocab, width))
            size = Drafting(drafting.depth, width, drafting.tokens)
            return head.fused.grow(self._layers[0], head.rotary, grown, size)
        foresight = Foresight(self._trees, noise, width)
        below = self._scratch.below(pairs.table_NP[list(wanted)], lengths_N)
        hidden_RH, logits_RV = ends

        def after(beam: Beam, attend: Attend) -> Top:
            """The head over the nodes of a beam: each continues the row that it is a child of."""
            nonlocal hidden_RH
            ids_R, above_RH = beam.tokens_NW.flatten().long(), hidden_RH[beam.rows_NW.flatten()]
            hidden_RH, logits_RV = self._head.draft(ids_R, above_RH, self._layers, attend)
            return foresight.top(logits_RV, self._ids_V)

        return grow(self._trees, foresight.top(logits_RV, self._ids_V), below, drafting, after)
