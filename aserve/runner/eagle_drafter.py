"""Drafts by a head of the EAGLE family: every row that stays becomes a pair of the head's own KV,
and a tree grows below the last of those that were drawn from."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from aserve.core.message import Drafting
from aserve.core.noise import U64
from aserve.core.tree import NO_DRAFT, Draft
from aserve.models.decoder import HIDDEN, feature_of
from aserve.models.eagle_spec import DraftHead, HeadSpec
from aserve.models.regions import Region
from aserve.runner.drafter import Kept
from aserve.runner.growing import Ints, Scratch, grow, pages_below, spread
from aserve.runner.inputs import PageTables
from aserve.runner.pairs import Pairs
from aserve.tensor.ops import Attend, KvLayer, Ops
from aserve.tensor.tree import Beam, Noise, Top, Trees, trees_of

GREEDY_BELOW = 1e-5  # a temperature, as in sampling
CANDIDATES = 32  # among which noise chooses: it may lift what is not likely


def features_of(spec: HeadSpec) -> tuple[str, ...]:
    """What a head takes of its target, in its order."""
    return tuple(map(feature_of, spec.captured)) or (HIDDEN,)


class EagleModel:
    """`DraftModel` of one head, whole, at the leader of a DP group.

    Pages of its KV have the target's numbers; those for drafts, of at most `sequences` at once,
    come after them.
    """

    def __init__(self, head: DraftHead, ops: Ops, most: Drafting, sequences: int, page_size: int):
        self._head, self._ops, self._page_size = head, ops, page_size
        self._each = pages_below(page_size, most)
        self.pages_beside = self._each * sequences

    def regions(self) -> tuple[Region, ...]:
        return self._head.regions()

    def drafter(self, kv: Sequence[KvLayer]) -> "EagleDrafter":
        first = len(kv[0].k_PSHD) - self.pages_beside
        scratch = Scratch(self._ops, kv, first, self._each, self._page_size)
        return EagleDrafter(self._head, trees_of(self._ops), kv, scratch)


class EagleDrafter:
    """See `Drafter`."""

    def __init__(
        self, head: DraftHead, trees: Trees, kv: Sequence[KvLayer], scratch: Scratch
    ) -> None:
        self._head, self._trees, self._layers, self._scratch = head, trees, kv, scratch
        self._tables = PageTables(scratch.page_size)
        self._features = features_of(head.spec)
        drafted_V = torch.arange(head.spec.draft_vocab)
        ids_V = head.token_ids(drafted_V)
        self._ids_V = None if torch.equal(ids_V, drafted_V) else ids_V.to(torch.int32)

    def drop(self, seq: int) -> None:
        self._tables.drop(seq)

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        drafts = [NO_DRAFT] * len(kept)
        if not kept:
            return drafts
        wanted = [n for n, one in enumerate(kept) if one.is_drawn] if drafting.tokens else []
        pairs, head = Pairs(kept, self._tables), self._head
        hidden_TH = head.start(pairs.of_rows([features[name] for name in self._features]))
        ends = head.draft(pairs.next_T, hidden_TH, self._layers, pairs.attend, pairs.ends(wanted))
        if wanted:
            lengths_N = pairs.kv_len_N[wanted]
            width = min(drafting.topk, head.spec.draft_vocab)
            growth = _Growth(*ends, width, _noise(kept, wanted, lengths_N))
            below = self._scratch.below(pairs.table_NP[wanted], lengths_N)
            top = self._likeliest(growth)

            def after(beam: Beam, attend: Attend) -> Top:
                self._descend(growth, beam, attend)
                return self._likeliest(growth)

            grown = grow(self._trees, top, below, drafting, after)
            for n, draft in zip(wanted, grown, strict=True):
                drafts[n] = draft
        return drafts

    def _descend(self, growth: "_Growth", beam: Beam, attend: Attend) -> None:
        """The head over the nodes of a beam: each continues the row that it is a child of."""
        above_RH = growth.hidden_RH[beam.rows_NW.flatten()]
        ids_R = beam.tokens_NW.flatten().long()
        made = self._head.draft(ids_R, above_RH, self._layers, attend)
        growth.hidden_RH, growth.logits_RV = made
        growth.level += 1

    def _likeliest(self, growth: "_Growth") -> Top:
        """What may follow each row, in tokens of the target."""
        logits_RV, k = growth.logits_RV, growth.width
        noise = growth.noise
        vocab = logits_RV.shape[1]
        top = self._trees.top(logits_RV, k if noise is None else min(vocab, max(k, CANDIDATES)))
        if self._ids_V is not None:
            top = Top(top.logprobs_RK, self._ids_V[top.tokens_RK])
        if noise is None:
            return top
        each = len(logits_RV) // len(noise.seeds_R)
        here = Noise(
            spread(noise.seeds_R, each),
            spread(noise.positions_R + growth.level, each),
            spread(noise.temperatures_R, each),
        )
        return self._trees.under_noise(top, here, k)


class _Growth:
    """Of a call: the rows of the last level, of one tree after another, and whose noise they have
    (None: all are greedy)."""

    __slots__ = ("hidden_RH", "level", "logits_RV", "noise", "width")

    def __init__(
        self, hidden_NH: Tensor, logits_NV: Tensor, width: int, noise: Noise | None
    ) -> None:
        self.hidden_RH, self.logits_RV = hidden_NH, logits_NV
        self.width, self.noise = width, noise
        self.level = 0


def _noise(kept: Sequence[Kept], wanted: Sequence[int], lengths_N: Ints) -> Noise | None:
    """Of the tokens behind those that were just drawn, which stand where the head's KV ends."""
    sampling = [kept[n].view.state.sampling for n in wanted]
    temperatures = [one.temperature for one in sampling]
    if max(temperatures) < GREEDY_BELOW:
        return None
    seeds = [_signed(one.seed) for one in sampling]
    return Noise(torch.tensor(seeds), torch.from_numpy(lengths_N + 1), torch.tensor(temperatures))


def _signed(seed: int) -> int:
    """The bits of a u64."""
    seed &= U64
    return seed - (seed >> 63 << 64)
