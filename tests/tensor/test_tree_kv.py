"""Plans, as the planner makes them of drafts, and trees as tensors say the same of rows and KV."""

from random import Random

import pytest
import torch

from aserve.core.message import Admit, Batch, Commit, Drafting, Rows, Sampling, StepPlan
from aserve.core.replica import Replica, RowsView
from aserve.core.tree import Draft, row_parents
from aserve.tensor.reference import ReferenceOps
from aserve.tensor.tree import Trees
from aserve.testing.drafts import draft
from tests.tensor.tree_cases import ints, kv_layers, offsets


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
def test_kv_of_paths_moves_as_plans_say(trees: Trees, page_size: int) -> None:
    """Of sequences that end at the first, second and last place of a page, and across pages."""
    random = Random(page_size)
    for start in sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size - 1}):
        layers, wanted = kv_layers(page_size, 60), kv_layers(page_size, 60)
        # The right path winds between decoys, so it is seldom the first rows.
        one = Draft(*draft(random, [1, 2, 3, 4, 5, 6], Drafting(20, 20, 20), 9))
        replica = Replica(page_size)
        view = planned(replica, start, one, random)
        parents, row_start_M = ints(view.rows.parents), offsets([view.n_rows])
        layout = trees.lay_out(row_start_M, parents, ints([start]))
        assert layout.positions_T.tolist() == view.positions()
        drawn = [position - start + 1 for position in view.positions()]
        accepted = trees.accept(
            row_start_M, parents, ints(view.rows.tokens), ints(drawn), ints(view.slots())
        )
        [(path, tokens)] = accepted.each(row_start_M)
        rows = [view.slots()[row] for row in path]
        before = [rows_at(layer.k_PSHD, rows) for layer in layers]
        trees.compact(layers, row_start_M, accepted.from_slots_T, accepted.to_slots_T)
        for layer, kept in zip(layers, before, strict=True):
            assert torch.equal(rows_at(layer.k_PSHD, view.slots()[: len(path)]), kept)
        committed = plan(2, commits=(Commit(0, path, tokens, True),), drops=(0,))
        for move in replica.apply(committed).moves:
            slots_from, slots_to = ints(move.slots_from), ints(move.slots_to)
            for layer in wanted:
                ReferenceOps().kv_move(layer, slots_from, slots_to)
        for mine, other in zip(layers, wanted, strict=True):
            assert torch.equal(mine.k_PSHD, other.k_PSHD)
            assert torch.equal(mine.v_PSHD, other.v_PSHD)


def plan(step: int, rows: tuple[Rows, ...] = (), **parts: object) -> StepPlan:
    given = {"commits": (), "drops": (), "moves": (), "admits": (), "sends": ()} | parts
    return StepPlan(step=step, microbatch=0, batches=(Batch(rows),), **given)  # type: ignore[arg-type]


def planned(replica: Replica, start: int, one: Draft, random: Random) -> RowsView:
    """The rows of a draft below token `start` of sequence 0, whose pages are all over the pool."""
    prompt = tuple(range(100, 100 + max(1, start)))
    pages = tuple(random.sample(range(60), (start + len(one.tokens)) // replica.page_size + 1))
    admit = Admit(0, prompt, len(prompt), 0, (), Sampling())
    root = prompt[0]
    rows, commits = (), ()
    if start:
        root = 99
        n_first = -(-start // replica.page_size)
        rows = (Rows(0, 0, prompt, (), True, pages[:n_first]),)
        commits, pages = (Commit(0, tuple(range(start)), (root,), False),), pages[n_first:]
    replica.apply(plan(0, rows, admits=(admit,)))
    tree = Rows(0, start, (root, *one.tokens), row_parents(one), True, pages)
    [view] = replica.apply(plan(1, (tree,), commits=commits)).views
    return view


def rows_at(pool: torch.Tensor, slots: list[int]) -> torch.Tensor:
    return pool.reshape(-1, *pool.shape[2:])[slots].clone()
