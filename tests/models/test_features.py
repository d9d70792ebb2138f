"""What drafters see of the target: the same rows by every way through a model and every layout."""

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.decoder import Model
from aserve.models.registry import load_model
from aserve.planes.layer import open_thread_planes
from aserve.runner.features import Features
from aserve.tensor.ops import open_ops
from aserve.training.target import Target
from tests.models.families import prompt, saved
from tests.models.ranks import LIMIT_S, Rank, Script, mixed_script
from tests.models.test_trees import DRAFT, PARENTS, Driven

ALL = ("feature_2", "hidden", "feature_0", "feature_1")
Seen = dict[tuple[int, int], dict[str, Tensor]]  # by step and group


def load(
    name: str, features: tuple[str, ...], kernels: str, layout: Layout | None = None, rank: int = 0
) -> Model:
    """`kernels` is one of Ops, or "plain" for native ones without blocks."""
    ops = open_ops("native" if kernels == "plain" else kernels, 1, kernels != "plain")  # type: ignore[arg-type]
    model = load_model(
        saved(name)[0], ops=ops, dtype="float32", layout=layout or Layout(), rank=rank
    )
    model.capture(features)
    return model


def rows_of(model: Model) -> list[Tensor]:
    """Of a chunk and of a tree below it: hidden, and what entered the captured layers."""
    driven = Driven(model, "auto")
    text = tuple(prompt(9, seed=2))
    found: list[Tensor] = []
    for view in (driven.view(0, 0, text), driven.view(0, 9, DRAFT, PARENTS)):
        seen: dict[int, Tensor] = {}
        found += driven.forward(view, seen=seen)
        assert set(seen) == set(model.captured)
        found += [seen[layer] for layer in sorted(seen)]
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_blocks_leave_the_bits_that_operations_leave(name: str, layers: tuple[int, ...]) -> None:
    wanted = tuple(f"feature_{layer}" for layer in layers)
    fused, plain = (rows_of(load(name, wanted, kernels)) for kernels in ("native", "plain"))
    assert len(fused) == 2 * (1 + len(layers))
    assert all(torch.equal(a, b) for a, b in zip(fused, plain, strict=True))
    hidden_only = rows_of(load(name, (), "native"))
    assert all(torch.equal(a, fused[n * (1 + len(layers))]) for n, a in enumerate(hidden_only))


def test_features_stay_as_they_are_when_the_next_step_comes() -> None:
    driven = Driven(load("llama", ("feature_1",), "native"), "auto")
    first: dict[int, Tensor] = {}
    driven.forward(driven.view(0, 0, tuple(prompt(9, seed=2))), seen=first)
    before = first[1].clone()
    driven.forward(driven.view(1, 0, tuple(prompt(9, seed=3))), seen={})
    assert torch.equal(first[1], before)


@pytest.mark.parametrize("captured", [(), (0, 2), (2, 1, 0)])
def test_a_head_is_served_what_it_was_trained_on(captured: tuple[int, ...]) -> None:
    names = tuple(f"feature_{layer}" for layer in captured) or ("hidden",)
    model = load("llama", names, "native")
    text = prompt(11, seed=4)
    driven, seen = Driven(model, "auto"), dict[int, Tensor]()
    (hidden,) = driven.forward(driven.view(0, 0, tuple(text)), seen=seen)
    side_by_side = torch.cat([seen[layer] for layer in captured] or [hidden], dim=1)
    trained = Target(load("llama", (), "native"), captured).read([text])
    assert torch.equal(side_by_side.bfloat16(), trained.features_TF)


def features_of(grid: Grid, load_: Callable[[int], Model], script: Script) -> Seen:
    """What the leaders of the last stage have after each step of a script."""
    planes = open_thread_planes(grid, limit_s=LIMIT_S)
    models = [load_(rank) for rank in range(grid.world)]
    ranks = [Rank(model, planes[rank], script) for rank, model in enumerate(models)]
    sent: list[queue.Queue[Mapping[str, Tensor]]] = [queue.Queue() for _ in ranks]
    found: Seen = {}

    def run(number: int) -> None:
        rank, model, features = ranks[number], models[number], Features(models[number])
        for step in range(len(script.steps)):
            rank.layer.start(step)
            work = rank.runner.work(step, rank.views(step))
            inward = sent[number].get(timeout=LIMIT_S) if work.inward else {}
            shapes = {name: (tuple(x.shape), x.dtype) for name, x in inward.items()}
            assert shapes == dict(work.inward)
            assert work.inputs is not None
            seen: dict[int, Tensor] = {}
            ids, attend, kv = work.inputs.ids_G, work.inputs.attend, rank.kv.layers
            hidden = model.forward(ids, work.tokens, kv, attend, inward.get("hidden"), seen)
            if not model.is_last:
                outward = features.outward(work.tokens, hidden, seen, inward)
                assert outward.keys() == features.nothing().keys()
                sent[number + grid.tp].put(outward)
                continue
            own = features.of_group(work.tokens, hidden, seen, inward)
            assert tuple(own) == model.features
            dp = grid.place(number).dp
            if number == grid.leader(dp):
                found[step, dp] = own

    with ThreadPoolExecutor(grid.world) as pool, torch.inference_mode():
        for job in [pool.submit(run, n) for n in range(len(ranks))]:
            job.result()
    return found


LAYOUTS = {
    "tp": Layout(tp=3),
    "pp": Layout(pp=3),
    "pp x tp": Layout(pp=2, tp=3),
    "dp": Layout(tp=3, dp=3),
    "cp": Layout(tp=2, cp=2),
    "cp zigzag": Layout(tp=4, cp=2, cp_split="zigzag"),
    "pp x dp x cp": Layout(pp=3, tp=4, dp=2, cp=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_groups_leader_has_its_rows_in_every_layout(name: str) -> None:
    layout, script = LAYOUTS[name], mixed_script()
    grid = Grid(layout)

    def of(layout: Layout) -> Seen:
        one = lambda rank: load("divisible", ALL, "native", layout, rank)  # noqa: E731
        return features_of(Grid(layout), one, script)

    alone, found = of(Layout()), of(layout)
    groups = script.groups(grid.dp)
    for step, pieces in enumerate(script.steps):
        rows = [piece.n_rows for piece in pieces]
        for feature, whole in alone[step, 0].items():
            parts = whole.split(rows)
            for dp in range(grid.dp):
                own = [part for part, p in zip(parts, pieces, strict=True) if groups[p.seq] == dp]
                wanted = torch.cat([*own, whole[:0]])
                assert torch.equal(found[step, dp][feature], wanted), (step, dp, feature)
