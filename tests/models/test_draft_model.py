"""A second model that drafts: here it is the target itself, so that every token is foreseen."""

import dataclasses
import functools
from collections.abc import Sequence

import pytest
import torch

from aserve.core.message import NO_DRAFTING, Admit, Drafting, Rows, Sampling
from aserve.core.noise import draw_key, token_bits, uniform
from aserve.core.replica import RowsView, SequenceState
from aserve.core.tree import NO_DRAFT, Draft, malformed
from aserve.models.registry import Model, load_model
from aserve.runner import draft_model, foresight
from aserve.runner.drafter import Kept
from aserve.runner.kv_store import KvStore
from aserve.runner.small_model import SmallModel
from aserve.tensor.ops import Attend, Ops, open_ops
from tests.models.families import VOCAB, oracle_logits, prompt, saved

PAGE_SIZE, PAGES = 4, 96
CHAIN = Drafting(3, 1, 3)
TREE = Drafting(3, 3, 9)


@functools.cache
def said(first: int, length: int, sampling: Sampling, n_tokens: int) -> list[int]:
    """A prompt and what transformers' model says after it."""
    _, model = saved("llama")
    tokens = prompt(length, seed=first)
    for _ in range(n_tokens):
        logits = oracle_logits(model, tokens)[-1].double()
        if sampling.temperature:
            key = draw_key(sampling.seed, len(tokens))
            bits = torch.tensor([uniform(token_bits(key, one)) for one in range(VOCAB)])
            logits = logits / sampling.temperature - (-bits.double().log()).log()
        tokens.append(int(logits.argmax()))
    return tokens


class Serving:
    """A drafter over sequences whose text is known beforehand."""

    def __init__(self, ops: Ops, drafting: Drafting, page_size: int = PAGE_SIZE) -> None:
        self.model: Model = load_model(saved("llama")[0], ops=ops)
        self.page_size = page_size
        small = SmallModel(self.model, drafting, 3, page_size, VOCAB)
        kv = KvStore(small.regions(), page_size, PAGES + small.pages_beside)
        self.drafter = small.drafter(kv.layers)
        self.drafting = drafting
        self.free = list(range(PAGES - 1, -1, -1))
        self.states: dict[int, SequenceState] = {}
        self.texts: dict[int, list[int]] = {}
        self._read: list[int] = []
        forward = self.drafter._forward

        def counted(ids_T: torch.Tensor, attend: Attend) -> torch.Tensor:
            self._read.append(len(ids_T))
            return forward(ids_T, attend)

        self.drafter._forward = counted  # type: ignore[method-assign]

    def rows_read(self) -> int:
        """By the model, since the last call."""
        read, self._read = sum(self._read), []
        return read

    def admit(
        self,
        seq: int,
        text: list[int],
        prompt_len: int,
        sampling: Sampling = Sampling(temperature=0.0),  # noqa: B008
        pages: Sequence[int] = (),
    ) -> None:
        kv_len = len(pages) * self.page_size
        admit = Admit(seq, tuple(text[:prompt_len]), prompt_len, kv_len, tuple(pages), sampling)
        self.states[seq], self.texts[seq] = SequenceState(admit), text

    def kept(self, seq: int, n_rows: int, n_drafted: int = 0) -> Kept:
        """The next rows of a sequence stay: a chunk, or a root and `n_drafted` accepted tokens."""
        state, text = self.states[seq], self.texts[seq]
        start = state.kv_len
        end = start + n_rows + n_drafted
        while len(state.pages) * self.page_size < end:
            state.pages.append(self.free.pop())
        is_drawn = end >= state.prompt_len
        parents = tuple(range(-1, n_drafted)) if n_drafted else ()
        rows = Rows(seq, start, tuple(text[start:end]), parents, is_drawn, ())
        view = RowsView(state, rows, 0, self.page_size)
        state.kv_len = end
        return Kept(view, 0, tuple(range(end - start)), tuple(text[start + 1 : end + 1]), is_drawn)

    def draft(self, *kept: Kept, drafting: Drafting | None = None) -> list[Draft]:
        found = self.drafter.draft(kept, {}, self.drafting if drafting is None else drafting)
        for one in kept:  # as a commit would
            state = self.states[one.view.rows.seq]
            state.tokens += self.texts[state.seq][len(state.tokens) : state.kv_len + 1]
        return found

    def foreseen(self, seq: int, draft: Draft) -> int:
        """How many of the text's next tokens are in the draft."""
        state, found, at = self.states[seq], 0, -1
        below = {pair: n for n, pair in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        for token in self.texts[seq][state.kv_len + 1 :]:
            if (at, token) not in below:
                break
            at = below[at, token]
            found += 1
        return found


@pytest.fixture(scope="module", params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_ops(request.param, 1)


GREEDY = Sampling(temperature=0.0)
SEEDED = Sampling(seed=7, temperature=0.8)


LENGTHS = (7, 8, 9)  # of prompts: a root before, at and behind a page border


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_chain_of_the_same_model_is_what_it_says(
    ops: Ops, sampling: Sampling, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight, "CANDIDATES", VOCAB)  # noise may lift any
    serving = Serving(ops, CHAIN, page_size)
    for seq, length in enumerate(LENGTHS):
        serving.admit(seq, said(seq, length, sampling, 24), length, sampling)
    drafts = serving.draft(*[serving.kept(seq, length) for seq, length in enumerate(LENGTHS)])
    for n_accepted in (3, 0, 1, 2, 3, 0):
        for seq, draft in enumerate(drafts):
            assert malformed(draft, CHAIN) is None
            assert serving.foreseen(seq, draft) == 3, (n_accepted, seq)
        drafts = serving.draft(*[serving.kept(seq, 1, n_accepted) for seq in range(3)])


def best_paths(tokens: list[int], drafting: Drafting) -> set[tuple[int, ...]]:
    """Of the likeliest nodes of a draft the paths from the root, without pages or trees."""
    _, model = saved("llama")
    width = drafting.topk
    every: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(drafting.depth):
        level = {}
        for path, score in beam.items():
            top = oracle_logits(model, [*tokens, *path])[-1].log_softmax(0).topk(width)
            for token, logprob in zip(top.indices.tolist(), top.values.tolist(), strict=True):
                level[(*path, token)] = score + logprob
        every |= level
        beam = dict(sorted(level.items(), key=lambda one: -one[1])[:width])
    return set(sorted(every, key=lambda path: -every[path])[: drafting.tokens])


def test_a_tree_has_the_likeliest_paths(ops: Ops) -> None:
    serving = Serving(ops, TREE)
    for seq, length in enumerate(LENGTHS):
        serving.admit(seq, said(seq, length, GREEDY, 24), length)
    drafts = serving.draft(*[serving.kept(seq, length) for seq, length in enumerate(LENGTHS)])
    for seq, draft in enumerate(drafts):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        known = serving.texts[seq][: LENGTHS[seq] + 1]
        assert set(paths) == best_paths(known, TREE), seq
        assert len(set(paths)) == TREE.tokens


def test_chunks_are_read_as_they_come_and_what_nobody_wanted_drafts_of_later(ops: Ops) -> None:
    serving = Serving(ops, CHAIN)
    serving.admit(0, said(3, 11, GREEDY, 24), 11)
    assert serving.draft(serving.kept(0, 8)) == [NO_DRAFT]
    assert serving.rows_read() == 8
    serving.draft(serving.kept(0, 3), drafting=NO_DRAFTING)
    assert serving.rows_read() == 3
    for n_accepted in (0, 2, 0):
        assert serving.draft(serving.kept(0, 1, n_accepted), drafting=NO_DRAFTING) == [NO_DRAFT]
        assert serving.rows_read() == 0
    (draft,) = serving.draft(serving.kept(0, 1))
    assert serving.foreseen(0, draft) == 3
    assert serving.rows_read() == 5 + 1 + 1 + 2  # left out, its row, the root, two levels


def test_rows_left_out_are_made_up_for_step_by_step(
    ops: Ops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "CATCH_UP_MAX", 4)
    serving = Serving(ops, CHAIN)
    for seq in range(2):
        serving.admit(seq, said(seq, 8, GREEDY, 24), 8)
    serving.draft(serving.kept(0, 8), serving.kept(1, 8), drafting=NO_DRAFTING)
    for _ in range(6):
        serving.draft(serving.kept(0, 1), serving.kept(1, 1), drafting=NO_DRAFTING)
    found = [serving.draft(serving.kept(0, 1), serving.kept(1, 1)) for _ in range(5)]
    ready = [[draft != NO_DRAFT for draft in drafts] for drafts in found]
    assert ready == [[False, False], [True, False], [True, False], [True, True], [True, True]]
    for seq, draft in enumerate(found[-1]):
        assert serving.foreseen(seq, draft) == 3


@pytest.mark.parametrize("was_drafted", [True, False])
def test_a_prefix_from_the_cache_foresees_as_much_as_one_that_was_computed(
    ops: Ops, was_drafted: bool
) -> None:
    text = said(5, 10, GREEDY, 24)
    serving = Serving(ops, CHAIN)
    drafting = CHAIN if was_drafted else NO_DRAFTING
    serving.admit(0, text, 10)
    serving.draft(serving.kept(0, 10), drafting=drafting)
    for _ in range(6):
        serving.draft(serving.kept(0, 1), drafting=drafting)
    serving.drafter.drop(0)
    serving.admit(1, text, 18, pages=serving.states[0].pages[:4])
    serving.rows_read()
    (draft,) = serving.draft(serving.kept(1, 2))
    assert serving.foreseen(1, draft) == 3
    # The text that was drafted over is there, else only its prompt.
    assert serving.rows_read() == (2 if was_drafted else 10) + 1 + 2


def test_pages_that_went_to_another_text_are_not_taken_for_its_own(ops: Ops) -> None:
    serving = Serving(ops, CHAIN)
    serving.admit(0, said(5, 10, GREEDY, 24), 10)
    serving.draft(serving.kept(0, 10))
    pages = serving.states[0].pages
    serving.drafter.drop(0)
    serving.free += reversed(pages)
    text = said(6, 5, GREEDY, 24)
    serving.admit(1, text, 5)
    serving.draft(serving.kept(1, 5), drafting=NO_DRAFTING)
    for _ in range(7):
        serving.draft(serving.kept(1, 1), drafting=NO_DRAFTING)
    serving.drafter.drop(1)
    assert serving.states[1].pages == pages
    serving.admit(2, text, 13, pages=pages)
    (draft,) = serving.draft(serving.kept(2, 1))
    assert serving.foreseen(2, draft) == 3


def test_beyond_its_context_a_draft_model_keeps_silent(ops: Ops) -> None:
    serving = Serving(ops, CHAIN)
    serving.model.spec = dataclasses.replace(serving.model.spec, context_len=12)
    serving.admit(0, said(1, 7, GREEDY, 24), 7)
    drafts = [serving.draft(serving.kept(0, rows))[0] for rows in (7, 1, 1, 1)]
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 0, 0]
    assert serving.foreseen(0, drafts[-1]) == 0
