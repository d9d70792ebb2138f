"""Draft heads against a reference written from the papers: prefill, chunks, chains and trees."""

import pathlib
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor

from aserve.models.decoder import Ends
from aserve.models.eagle_loading import load_head, read_shared, shared_with
from aserve.models.eagle_spec import DraftHead, Shared
from aserve.models.registry import Types, load_model
from aserve.runner.kv_store import KvStore
from aserve.tensor.ops import Attend, Ops, open_ops, paths_of, tree_of
from tests.models import heads
from tests.models.families import VOCAB, prompt, saved

PAGE_SIZE, PAGES = 4, 40
PARENTS = (-1, -1, 0, 0, 1, 2, 2, 4)


@pytest.fixture(scope="module", params=["native", "reference"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_ops(request.param, 1)


@pytest.fixture(scope="module")
def shared(ops: Ops) -> Shared:
    return shared_with(load_model(saved("llama")[0], ops=ops))


class Drafting:
    """One sequence's pairs through a head, by hand, over shuffled pages."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head
        self.kv = KvStore(head.regions(), PAGE_SIZE, PAGES)
        for layer in self.kv.layers:  # what is read before it is written shows
            layer.k_PSHD.fill_(torch.nan)
            layer.v_PSHD.fill_(torch.nan)
        shuffled = torch.randperm(PAGES, generator=torch.Generator().manual_seed(4))
        self.pages = shuffled.to(torch.int32)

    def __call__(
        self, ids: list[int], hidden: Tensor, start: int, parents: tuple[int, ...] = ()
    ) -> Tensor:
        attend = self.attend(len(ids), start, parents)
        return self.head.forward(torch.tensor(ids), hidden, self.kv.layers, attend)

    def attend(self, n_rows: int, start: int, parents: tuple[int, ...] = ()) -> Attend:
        places = torch.arange(start, start + n_rows)
        slots = self.pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        paths = paths_of(parents)
        positions = torch.tensor([start + len(path) - 1 for path in paths]) if parents else places
        return Attend(
            slots_T=slots.to(torch.int32),
            positions_T=positions.to(torch.int32),
            page_table_NP=self.pages[None],
            row_start_M=torch.tensor([0, n_rows], dtype=torch.int32),
            kv_len_N=torch.tensor([start + n_rows], dtype=torch.int32),
            tree=tree_of(paths) if parents else None,
        )


def causal(n_rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(n_rows), torch.ones(n_rows, n_rows, dtype=torch.bool).tril()


def under(n_before: int) -> tuple[Tensor, Tensor]:
    """Of a text and then the rows of a tree below it."""
    paths = paths_of(PARENTS)
    total = n_before + len(paths)
    positions, sees = torch.arange(total), torch.zeros(total, total, dtype=torch.bool)
    sees[:n_before, :n_before] = causal(n_before)[1]
    for row, path in enumerate(paths):
        positions[n_before + row] = n_before + len(path) - 1
        sees[n_before + row, :n_before] = True
        sees[n_before + row, [n_before + node for node in path]] = True
    return positions, sees


def near(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


Rows = Callable[[heads.Tensors, Tensor, Tensor, tuple[Tensor, Tensor]], Tensor]
CASES = {
    "eagle": (heads.eagle(), heads.eagle_rows),
    "eagle-two-layers": (heads.eagle(layers=2, bias=False), heads.eagle_rows),
    "eagle-own-table": (heads.eagle(table=True), heads.eagle_rows),
    "eagle3": (heads.eagle3(), heads.eagle3_rows),
    "eagle3-layers.0": (heads.eagle3((2, 2), "layers.0."), heads.eagle3_rows),
}


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_head_computes_what_its_paper_says(
    name: str, ops: Ops, shared: Shared, tmp_path: pathlib.Path
) -> None:
    (config, weights), rows = CASES[name]
    head = load_head(heads.write(tmp_path, config, weights), shared, ops)
    generator = torch.Generator().manual_seed(7)
    text, n_rows = prompt(13, seed=8), 13
    features = torch.randn(n_rows, head.spec.feature_len, generator=generator)
    table = weights.get("embed_tokens.weight", saved(name="llama")[1].model.embed_tokens.weight)
    first = features if head.spec.method == "eagle" else features @ weights["fc.weight"].T
    expected = rows(weights, table[text], first, causal(n_rows))

    drafting = Drafting(head)
    started = head.start(features)
    near(started, first)
    # In two chunks, as a long prompt comes.
    ours = torch.cat((drafting(text[:9], started[:9], 0), drafting(text[9:], started[9:], 9)))
    near(ours, expected)
    near(head.logits(ours), logits(head, weights, expected))

    # A tree below: its rows take what the head made of their parents, or of the last row.
    ids = prompt(len(PARENTS), seed=9)
    hidden = torch.randn(len(PARENTS), heads.HIDDEN, generator=generator)
    whole = rows(weights, table[text + ids], torch.cat((first, hidden)), under(n_rows))
    near(drafting(ids, hidden, n_rows, PARENTS), whole[n_rows:])
    # The text goes on over what the tree left behind.
    near(drafting(ids[:1], hidden[:1], n_rows), whole[n_rows : n_rows + 1])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("weights", [None, "int8"])
@torch.inference_mode()
def test_a_call_for_a_whole_head_has_the_bits_of_its_operations(
    name: str, weights: Literal["int8"] | None, tmp_path: pathlib.Path
) -> None:
    heads.write(tmp_path, *CASES[name][0])

    def rows(fused: bool) -> list[Tensor]:
        ops = open_ops("native", 1, fused)
        shared = shared_with(load_model(saved("llama")[0], ops=ops, dtype="bf16"))
        head = load_head(tmp_path, shared, ops, weights=weights)
        drafting, generator = Drafting(head), torch.Generator().manual_seed(7)
        hidden = torch.randn(13 + len(PARENTS), heads.HIDDEN, generator=generator)
        ids = prompt(13 + len(PARENTS), seed=8)
        attend = drafting.attend(13, 0)
        last = Ends(torch.tensor([12]), drafting.attend(1, 12))
        ends = head.draft(torch.tensor(ids[:13]), hidden[:13], drafting.kv.layers, attend, last)
        tree = drafting.attend(len(PARENTS), 13, PARENTS)
        nodes = head.draft(torch.tensor(ids[13:]), hidden[13:], drafting.kv.layers, tree)
        again = Drafting(head)
        whole = head.draft(torch.tensor(ids[:13]), hidden[:13], again.kv.layers, attend)
        assert all(torch.equal(a[-1:], b) for a, b in zip(whole, ends, strict=True))
        nobody = Ends(torch.empty(0, dtype=torch.int64), drafting.attend(0, 13))
        none = head.draft(torch.tensor(ids[:13]), hidden[:13], again.kv.layers, attend, nobody)
        assert [len(one) for one in none] == [0, 0]
        pools = [part.nan_to_num(9.0) for x in drafting.kv.layers for part in (x.k_PSHD, x.v_PSHD)]
        return [*ends, *nodes, *whole, *pools]

    assert all(torch.equal(a, b) for a, b in zip(rows(True), rows(False), strict=True))


def logits(head: DraftHead, weights: heads.Tensors, hidden: Tensor) -> Tensor:
    if head.spec.method == "eagle":
        return hidden @ saved("llama")[1].lm_head.weight.T
    return heads.rms(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T


def test_drafted_tokens_are_tokens_of_the_target(
    ops: Ops, shared: Shared, tmp_path: pathlib.Path
) -> None:
    config, weights = heads.eagle3()
    head = load_head(heads.write(tmp_path / "3", config, weights), shared, ops)
    drafted = torch.tensor([[0, 5], [47, 1]])
    ids = weights["t2d"].nonzero()[:, 0]
    assert torch.equal(head.token_ids(drafted), ids[drafted])
    whole = load_head(heads.write(tmp_path / "1", *heads.eagle()), shared, ops)
    assert torch.equal(whole.token_ids(drafted), drafted)
    assert whole.spec.draft_vocab == VOCAB


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_the_ends_of_a_target_may_be_read_alone(name: str, ops: Ops) -> None:
    path, model = saved(name)
    shared = read_shared(path, ops)
    ids = torch.tensor(prompt(6))
    hidden = torch.randn(6, heads.HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.embed(shared.table, ids), model.model.embed_tokens.weight[ids])
    near(ops.linear(hidden, shared.head), hidden @ model.lm_head.weight.detach().T)


def test_the_heads_kv_is_a_region_of_its_own(
    shared: Shared, ops: Ops, tmp_path: pathlib.Path
) -> None:
    head = load_head(heads.write(tmp_path, *heads.eagle(layers=2)), shared, ops)
    (region,) = head.regions()
    assert (region.name, region.layers, region.axes) == ("draft_kv", (0, 1), ())
    assert (region.heads, region.head_dim) == (heads.KV_HEADS, heads.DIM)
    assert head.nbytes > 0


@pytest.mark.parametrize(
    "types",
    [
        {},
        {"weights": "int8"},
        {"weights": "q4"},
        {"dtype": "float32"},
        {"weights": "bf16", "dtype": "float32"},
    ],
    ids=lambda types: "-".join(types.values()) or "as they are",
)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_ends_that_are_read_alone_are_those_of_the_loaded_target(
    name: str, types: Types, ops: Ops
) -> None:
    """Else heads would foresee more in one layout than in another."""
    path, _ = saved(name)
    alone = read_shared(path, ops, **types)
    whole = shared_with(load_model(path, ops=ops, **types))
    ids = torch.tensor(prompt(6))
    hidden = torch.randn(6, heads.HIDDEN, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.embed(alone.table, ids), ops.embed(whole.table, ids))
    assert torch.equal(ops.linear(hidden, alone.head), ops.linear(hidden, whole.head))
