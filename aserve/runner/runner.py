"""A rank's runner: applies plans to its copy of the state, runs the model, reports what it drew."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from aserve.core.message import NO_DRAFTING, Drafting, Result, StepPlan, StepReport
from aserve.core.replica import KvMove, Replica, RowsView
from aserve.core.tree import malformed
from aserve.models.registry import Model
from aserve.runner.drafter import Drafter, Kept
from aserve.runner.drawing import Drawing
from aserve.runner.draws import Draws
from aserve.runner.features import Features
from aserve.runner.inputs import PageTables, StepInputs, tokens_of
from aserve.runner.kv_store import KvStore
from aserve.tensor.collective import LayerPlane
from aserve.tensor.sampler import Sampler
from aserve.tensor.tokens import Seat, Tokens
from aserve.text import grammar
from aserve.text.tokenizer import Tokenizer

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One plan's rows, of all groups, beside the state they work on; `tokens` says where they are,
    and `inputs` are there if there are rows.

    `moves` of KV come first, and what is kept of the sequences in `drops` goes. `inward` says what
    the stage before sends to this rank, and `digest` covers the log so far.
    """

    step: int
    views: tuple[RowsView, ...]
    moves: tuple[KvMove, ...]
    drops: tuple[int, ...]
    tokens: Tokens
    inputs: StepInputs | None
    inward: Mapping[str, tuple[Shape, torch.dtype]]
    digest: int
    drafting: Drafting


@dataclasses.dataclass(frozen=True, slots=True)
class Outward:
    """`bundle` is for the next stage; `results` are there at the leader of a DP group."""

    results: tuple[Result, ...]
    bundle: Mapping[str, Tensor]
    digest: int
    micros: int
    draft_micros: int  # of these


class Runner:
    """The rank that `model` was loaded for. `forward` is for the compute thread, and alone touches
    draws; plans are applied while earlier ones are computed, so `apply` makes all inputs that do
    not wait for what those draw.

    `layer` is the rank's end of the layer plane; a stage of one rank needs none. A `drafter` is at
    the leaders of DP groups; the other ranks obey what comes of it in plans.
    """

    def __init__(
        self,
        model: Model,
        kv: KvStore,
        sampler: Sampler,
        tokenizer: Tokenizer,
        layer: LayerPlane | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        assert len(kv.layers) == len(model.stage), (len(kv.layers), model.stage)
        self.rank = model.rank
        self._model = model
        self._seat = Seat(model.grid, model.rank, layer, model.ops)
        assert drafter is None or self._seat.is_leader, self.rank
        self._kv = kv
        self._replica = Replica(kv.page_size)
        self._tables = PageTables(kv.page_size)
        self._draws = Draws(partial(grammar.compile, tokenizer=tokenizer, vocab=model.spec.vocab))
        self._drawing = Drawing(model, self._seat, sampler, self._draws)
        self._features = Features(model)
        self._drafter = drafter

    def apply(self, plan: StepPlan) -> Work:
        """Bookkeeping; asserts that the plan follows from those before it."""
        assert len(plan.batches) == self._seat.grid.dp, (len(plan.batches), self._seat.grid.dp)
        views, moves = self._replica.apply(plan)
        return self.work(plan.step, views, moves, plan.drops, plan.drafting)

    def work(
        self,
        step: int,
        views: tuple[RowsView, ...],
        moves: tuple[KvMove, ...] = (),
        drops: tuple[int, ...] = (),
        drafting: Drafting = NO_DRAFTING,
    ) -> Work:
        """What is to be done for the rows of a plan that has been applied."""
        tokens = tokens_of(views, self._seat)
        inward: dict[str, tuple[Shape, torch.dtype]] = {}
        if not self._model.is_first:
            n_rows = tokens.slice_counts[self._seat.place.attn_tp]
            inward = self._features.inward(n_rows)
        for seq in drops:
            self._tables.drop(seq)
        inputs = StepInputs(views, self._tables, tokens) if views else None
        digest = self._replica.digest
        return Work(step, views, moves, drops, tokens, inputs, inward, digest, drafting)

    def forward(self, work: Work, inward: Mapping[str, Tensor] | None) -> Outward:
        """Run the rows through the stage and draw. An error of one sequence is its own.

        A stage without rows calls nobody; a group without rows in a step where others have some
        takes part like them.
        """
        started = time.perf_counter()
        self._seat.layer.start(work.step)
        results: tuple[Result, ...] = ()
        bundle: Mapping[str, Tensor] = {}
        draft_micros = 0
        self._move(work.moves)
        for seq in work.drops:
            self._draws.drop(seq)
            if self._drafter is not None:
                self._drafter.drop(seq)
        if work.inputs is not None:
            results, bundle, draft_micros = self._run(work, work.inputs, inward or {})
        elif not self._model.is_last:
            bundle = self._features.nothing()
        micros = round((time.perf_counter() - started) * 1e6)
        return Outward(results, bundle, work.digest, micros, draft_micros)

    def report(self, plan: StepPlan, outward: Outward) -> StepReport:
        return StepReport(
            plan.step,
            self.rank,
            outward.digest,
            outward.results,
            (),
            (),
            outward.micros,
            draft_micros=outward.draft_micros,
        )

    def _run(
        self, work: Work, inputs: StepInputs, inward: Mapping[str, Tensor]
    ) -> tuple[tuple[Result, ...], Mapping[str, Tensor], int]:
        """Results, what the next stage gets, and microseconds spent on drafts."""
        model, tokens = self._model, work.tokens
        if inputs.lagging:
            inputs.fill_in(self._drawn(inputs.lagging))
        seen: dict[int, Tensor] = {}
        hidden_TH = model.forward(
            inputs.ids_G, tokens, self._kv.layers, inputs.attend, inward.get("hidden"), seen
        )
        if not model.is_last:
            return (), self._features.outward(tokens, hidden_TH, seen, inward), 0
        features = self._features.of_group(tokens, hidden_TH, seen, inward)
        results = self._drawing.results(work.views, tokens, inputs.last_rows, hidden_TH)
        if self._drafter is None:
            return results, {}, 0
        started = time.perf_counter()
        results = self._with_drafts(work, results, features, self._drafter)
        return results, {}, round((time.perf_counter() - started) * 1e6)

    def _with_drafts(
        self,
        work: Work,
        results: tuple[Result, ...],
        features: Mapping[str, Tensor],
        drafter: Drafter,
    ) -> tuple[Result, ...]:
        """What is to come below these results, of the own group's rows."""
        kept: list[Kept] = []
        places: list[int] = []
        own = [view for view in work.views if view.group == self._seat.place.dp]
        first_row = 0
        for place, (view, result) in enumerate(zip(own, results, strict=True)):
            if result.error is None:
                kept.append(Kept.of(view, first_row, result))
                places.append(place)
            first_row += view.n_rows
        if not kept:
            return results
        drafted = list(results)
        drafts = drafter.draft(kept, features, work.drafting)
        for place, draft in zip(places, drafts, strict=True):
            if draft.tokens:
                assert results[place].tokens, results[place].seq
                assert malformed(draft, work.drafting) is None, draft
                drafted[place] = msgspec.structs.replace(
                    results[place], draft_tokens=draft.tokens, draft_parents=draft.parents
                )
        return tuple(drafted)

    def _drawn(self, lagging: Sequence[RowsView]) -> list[int]:
        """The tokens of these rows: told to the stage by the leaders who drew them. Where a draw
        failed it is any token: nobody looks at what comes of it.
        """
        seat, draws = self._seat, self._draws
        own = [view for view in lagging if view.group == seat.place.dp]
        drawn = [max(0, draws.last(view.rows.seq)) for view in own]
        if seat.grid.tp == 1:
            return drawn
        counts = [0] * seat.grid.tp
        for view in lagging:
            counts[seat.grid.leader(view.group)] += 1
        mine_N = torch.tensor(drawn if seat.is_leader else [], dtype=torch.int64)
        told: list[int] = seat.tp.all_gather(mine_N, counts).tolist()
        return told

    def _move(self, moves: Sequence[KvMove]) -> None:
        """Within this group's pool, in every layer of the stage."""
        own = [move for move in moves if move.group == self._seat.place.dp]
        if not own:
            return
        slots_from = torch.tensor([s for move in own for s in move.slots_from], dtype=torch.int32)
        slots_to = torch.tensor([s for move in own for s in move.slots_to], dtype=torch.int32)
        for pages in self._kv.layers:
            self._model.ops.kv_move(pages, slots_from, slots_to)
