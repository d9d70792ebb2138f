"""Prompt lookup: what followed the last few tokens when they came before (Saxena 2023; Yang et al.
2023, "Inference with Reference"). No weights and no KV; a text that repeats itself is foreseen.

Occurrences are found as deflate finds them (RFC 1951, section 4): those of the shortest match are
linked from the latest back, and of a bounded number of them the longest match wins, the latest
among equals. A copy may run on into what it copies.
"""

from array import array
from collections.abc import Mapping, Sequence

from torch import Tensor

from aserve.core.message import Drafting
from aserve.core.tree import NO_DRAFT, Draft
from aserve.models.regions import Region
from aserve.runner.drafter import Kept
from aserve.tensor.ops import KvLayer

LOOKED_AT_MAX = 64  # earlier occurrences, in one search
NOWHERE = -1


class Text:
    """The tokens of one sequence, and where each run of `match_min` of them ended before.

    It takes some 300 bytes a token, and a sequence has no more than the context.
    """

    def __init__(self, match_min: int, match_max: int) -> None:
        assert 1 <= match_min <= match_max, (match_min, match_max)
        self.tokens: list[int] = []
        self._match_min, self._match_max = match_min, match_max
        self._last: dict[tuple[int, ...], int] = {}  # the end of the latest such run
        self._before = array("i")  # of the run that ends behind a token: where the one before ended

    def extend(self, tokens: Sequence[int]) -> None:
        known, last, before, n = self.tokens, self._last, self._before, self._match_min
        for token in tokens:
            known.append(token)
            end = len(known)
            if end < n:
                before.append(NOWHERE)
                continue
            run = tuple(known[end - n :])
            before.append(last.get(run, NOWHERE))
            last[run] = end

    def matches(self, enough: int = LOOKED_AT_MAX) -> list[int]:
        """Where runs end that are like the last one: the longest first, then the latest. Nothing
        is better than `enough` that match as far as any may."""
        if not self.tokens:
            return []
        found: list[tuple[int, int]] = []
        at = self._before[-1]
        while at != NOWHERE and len(found) < LOOKED_AT_MAX and enough > 0:
            length = self._match_len(at)
            enough -= length == self._match_max
            found.append((-length, at))
            at = self._before[at - 1]
        # Stable: the latest stays in front of its equals.
        found.sort(key=lambda one: one[0])
        return [at for _, at in found]

    def _match_len(self, end: int) -> int:
        known, have = self.tokens, len(self.tokens)
        length = self._match_min
        while (
            length < min(self._match_max, end)
            and known[end - 1 - length] == known[have - 1 - length]
        ):
            length += 1
        return length

    def after(self, end: int, count: int) -> list[int]:
        """What would come next, were the text to go on as it did at `end`."""
        known, period = self.tokens, len(self.tokens) - end
        return [known[end + n % period] for n in range(count)]


def draft_of(text: Text, drafting: Drafting) -> Draft:
    """The continuations of all matches, merged where they begin alike; the best one is whole, the
    others take what is left."""
    tokens: list[int] = []
    parents: list[int] = []
    below: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    n_children: dict[int, int] = {}
    for end in text.matches(1 if drafting.topk == 1 else LOOKED_AT_MAX):
        parent = -1
        for token in text.after(end, drafting.depth):
            node = below.get((parent, token))
            if node is None:
                if len(tokens) >= drafting.tokens:
                    return Draft(tuple(tokens), tuple(parents))
                if n_children.get(parent, 0) >= drafting.topk:
                    break
                n_children[parent] = n_children.get(parent, 0) + 1
                node = below[parent, token] = len(tokens)
                tokens.append(token)
                parents.append(parent)
            parent = node
    return Draft(tuple(tokens), tuple(parents)) if tokens else NO_DRAFT


class NgramDrafter:
    """`Drafter` of texts that repeat themselves."""

    def __init__(self, match_min: int, match_max: int) -> None:
        self._match_min, self._match_max = match_min, match_max
        self._texts: dict[int, Text] = {}

    def draft(
        self, kept: Sequence[Kept], features: Mapping[str, Tensor], drafting: Drafting
    ) -> list[Draft]:
        """See `Drafter`."""
        return [
            draft_of(text, drafting) if one.is_drawn and drafting.tokens else NO_DRAFT
            for one, text in zip(kept, [self._brought_up(one) for one in kept], strict=True)
        ]

    def _brought_up(self, one: Kept) -> Text:
        """The text up to the last of `one.tokens`. The state may be ahead of it, or behind."""
        view = one.view
        text = self._texts.get(view.rows.seq)
        if text is None:
            text = self._texts[view.rows.seq] = Text(self._match_min, self._match_max)
            text.extend(view.state.tokens[: view.start + 1])
        assert len(text.tokens) == view.start + 1, (view.rows.seq, len(text.tokens), view.start)
        text.extend(one.tokens)
        return text

    def drop(self, seq: int) -> None:
        self._texts.pop(seq, None)


class NgramModel:
    """`DraftModel` of it: nothing at all."""

    pages_beside = 0

    def __init__(self, match_min: int, match_max: int) -> None:
        self._lengths = match_min, match_max

    def regions(self) -> tuple[Region, ...]:
        return ()

    def drafter(self, kv: Sequence[KvLayer]) -> NgramDrafter:
        return NgramDrafter(*self._lengths)
