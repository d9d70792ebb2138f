"""Rows of a drafted tree through a model: the hidden states of as many plain sequences."""

import pytest
import torch
from torch import Tensor

from aserve.core.message import Admit, Rows, Sampling
from aserve.core.replica import RowsView, SequenceState
from aserve.models.regions import KvDtype, stored_as
from aserve.models.registry import Model, load_model
from aserve.runner.inputs import PageTables, StepInputs, tokens_of
from aserve.runner.kv_store import KvStore
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Ops, open_ops, paths_of
from aserve.tensor.tokens import Seat
from tests.models.families import prompt, saved

PAGE_SIZE = 4
PARENTS = (-1, 0, 0, 1, 1, 2, 5, 3, 6, -1)
DRAFT = tuple(prompt(len(PARENTS), seed=5))


class Driven:
    """One model and its KV, fed rows by hand as the runner would."""

    def __init__(self, model: Model, kv_dtype: KvDtype) -> None:
        self.model, self.seat = model, Seat(model.grid, model.rank, None, model.ops)
        self.kv = KvStore(stored_as(model.regions(), kv_dtype), PAGE_SIZE, 64)
        self.tables = PageTables(PAGE_SIZE)
        self.free = list(range(63, -1, -1))
        self.states: dict[int, SequenceState] = {}

    def view(
        self, seq: int, start: int, tokens: tuple[int, ...], parents: tuple[int, ...] = ()
    ) -> RowsView:
        if seq not in self.states:
            self.states[seq] = SequenceState(Admit(seq, tokens, len(tokens), 0, (), Sampling()))
        state = self.states[seq]
        while len(state.pages) * PAGE_SIZE < start + len(tokens):
            state.pages.append(self.free.pop())
        return RowsView(state, Rows(seq, start, tokens, parents, True, ()), 0, PAGE_SIZE)

    @torch.inference_mode()
    def forward(self, *views: RowsView, seen: dict[int, Tensor] | None = None) -> list[Tensor]:
        tokens = tokens_of(views, self.seat)
        inputs = StepInputs(views, self.tables, tokens)
        ids, attend, kv = inputs.ids_G, inputs.attend, self.kv.layers
        hidden = self.model.forward(ids, tokens, kv, attend, seen=seen)
        return list(hidden.split([view.n_rows for view in views]))


@pytest.fixture(scope="module", params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_ops(request.param, 1)


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "int8"])
@pytest.mark.parametrize("start", [5, 37])
def test_rows_of_a_tree_are_rows_of_plain_sequences(
    ops: Ops, kv_dtype: KvDtype, start: int
) -> None:
    driven = Driven(load_model(saved("llama")[0], ops=ops), kv_dtype)
    text, other = tuple(prompt(start, seed=2)), tuple(prompt(9, seed=3))
    driven.forward(driven.view(0, 0, text), driven.view(1, 0, other))
    beside, tree = driven.forward(driven.view(1, 9, (7,)), driven.view(0, start, DRAFT, PARENTS))
    assert tree.isfinite().all()
    for row, path in enumerate(paths_of(PARENTS)):
        chain = text + tuple(DRAFT[node] for node in path)
        plain = driven.forward(driven.view(100 + row, 0, chain))[0]
        driven.free += driven.states[100 + row].pages
        if isinstance(ops, NativeOps):
            assert torch.equal(tree[row], plain[-1])
        else:  # the twin makes no promise about bits
            torch.testing.assert_close(tree[row], plain[-1], rtol=1e-4, atol=1e-4)
    alone = driven.forward(driven.view(200, 0, (*other, 7)))[0]
    torch.testing.assert_close(beside[0], alone[-1], rtol=1e-4, atol=1e-4)
