"""Splits: whatever the layout, the ranks' slices are the whole, and each rank can say which."""

import pathlib
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aserve.core.config import Layout
from aserve.errors import ConfigError
from aserve.models.decoder import row_blocks
from aserve.models.registry import load_model
from aserve.models.split import WHOLE, Split, share, slice_for
from aserve.models.weights.loader import Checklist, Matrix, Reader
from aserve.models.weights.safetensors import SafetensorsSource, open_safetensors
from aserve.tensor.collective import sum_blocks
from aserve.tensor.reference import ReferenceOps
from tests.models.families import saved

AXES = ["tp", "dp", "cp", "attn_tp", "moe_dp", "ep", "moe_tp"]
small = st.sampled_from([1, 2, 3])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    dp, cp, attn_tp, moe_dp = (draw(small) for _ in range(4))
    tp = dp * cp * attn_tp * moe_dp
    ep = draw(st.sampled_from([n for n in (1, 2, 3) if tp % (moe_dp * n) == 0]))
    return Layout(tp=tp, dp=dp, cp=cp, moe_dp=moe_dp, ep=ep)


@given(layouts(), st.lists(st.sampled_from(AXES), max_size=2, unique=True), st.data())
def test_slices_of_all_ranks_reassemble_the_whole(
    layout: Layout, axes: list[str], data: st.DataObject
) -> None:
    if "tp" in axes or (
        axes and len({axis.startswith("moe") or axis == "ep" for axis in axes}) > 1
    ):
        axes = axes[:1]  # axes of one split come from one way of laying out ranks
    dim = data.draw(st.integers(0, 1))
    split = Split(dim, tuple(axes))
    _, places = share(split, layout, 0)
    units = data.draw(st.sampled_from([0, places, 2 * places]))
    split = Split(dim, tuple(axes), units=units)
    length = units * data.draw(st.integers(1, 3)) if units else data.draw(st.integers(1, 40))
    shape = (length, 3) if dim == 0 else (3, length)
    whole = torch.arange(length * 3).view(shape)
    parts: dict[int, torch.Tensor] = {}
    for rank in range(layout.tp):
        place, _ = share(split, layout, rank)
        part = whole[slice_for(split, shape, layout, rank)]
        if place in parts:
            assert torch.equal(parts[place], part), "ranks at one place hold the same"
        parts[place] = part
    assert sorted(parts) == list(range(places))
    assert torch.equal(torch.cat([parts[place] for place in range(places)], dim=dim), whole)
    sizes = [part.shape[dim] for part in parts.values()]
    assert max(sizes) - min(sizes) <= (0 if units else 1)


@given(layouts())
def test_a_split_over_axes_of_size_one_is_whole(layout: Layout) -> None:
    axes = tuple(a for a in ("dp", "cp", "attn_tp") if share(Split(0, (a,)), layout, 0)[1] == 1)
    index = slice_for(Split(0, axes, units=7), (7, 5), layout, layout.tp - 1)
    assert index == slice_for(WHOLE, (7, 5), layout, 0) == (slice(0, 7), slice(0, 5))


def test_kv_heads_are_copied_where_there_are_more_ranks_than_heads() -> None:
    split = Split(0, ("attn_tp",), units=2, replicas=True)
    layout = Layout(tp=4)
    starts = [slice_for(split, (32, 8), layout, rank)[0] for rank in range(4)]
    assert starts == [slice(0, 16), slice(0, 16), slice(16, 32), slice(16, 32)]
    with pytest.raises(ConfigError, match="2 parts cannot be copied evenly to 3 ranks"):
        slice_for(split, (32, 8), Layout(tp=3), 0)


def test_units_are_never_cut() -> None:
    with pytest.raises(ConfigError, match="3 parts do not split over 2 ranks"):
        slice_for(Split(0, ("tp",), units=3), (96, 8), Layout(tp=2), 0)


@pytest.mark.parametrize(
    ("k", "blocks"), [(1536, 12), (8960, 8), (768, 8), (128, 4), (96, 3), (100, 1), (32, 1)]
)
def test_row_blocks_are_whole_tiles(k: int, blocks: int) -> None:
    assert row_blocks(k) == blocks


@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "mixtral"])
def test_what_two_ranks_load_is_what_one_loads(name: str) -> None:
    """Column-parallel rows are one below the other; row-parallel sums add up, in whole blocks."""
    folder = saved(name)[0]
    ops = ReferenceOps()
    one = load_model(folder, ops=ops)
    ranks = [load_model(folder, ops=ops, layout=Layout(tp=2), rank=rank) for rank in range(2)]
    x = torch.randn(5, 64)
    attention = [model.layers[1].attention for model in (one, *ranks)]
    assert [a.heads for a in attention] == [4, 2, 2]
    assert [a.kv_heads for a in attention] == [2, 1, 1]
    assert [a.out.weight.row_blocks for a in attention] == [2, 1, 1]
    dim = attention[0].dim
    whole, first, second = (ops.linear(x, a.qkv).view(5, -1, dim) for a in attention)
    q = torch.cat((first[:, :2], second[:, :2]), 1)
    k, v = (torch.cat((first[:, i : i + 1], second[:, i : i + 1]), 1) for i in (2, 3))
    torch.testing.assert_close(whole, torch.cat((q, k, v), 1))
    y = torch.randn(5, 4 * dim)
    parts = [
        ops.linear_parts(y[:, s], a.out.weight)
        for s, a in zip(_halves(4 * dim), attention[1:], strict=True)
    ]
    summed = attention[1].out.settle(sum_blocks(torch.cat(parts)))
    torch.testing.assert_close(ops.linear(y, attention[0].out.weight), summed)


def _halves(length: int) -> tuple[slice, slice]:
    return slice(0, length // 2), slice(length // 2, length)


def test_experts_go_whole_to_their_ranks() -> None:
    folder = saved("mixtral")[0]
    layout = Layout(tp=2, ep=2)
    held = [
        load_model(folder, ops=ReferenceOps(), layout=layout, rank=rank).layers[0].mlp.held  # type: ignore[attr-defined]
        for rank in range(2)
    ]
    assert held == [range(0, 2), range(2, 4)]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_a_rank_reads_no_expert_of_another_and_its_progress_ends(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    read = SafetensorsSource.read

    def counted(self: SafetensorsSource, name: str, *rest: Any) -> torch.Tensor:
        reads[name] += 1
        return read(self, name, *rest)

    monkeypatch.setattr(SafetensorsSource, "read", counted)
    seen: list[tuple[int, int]] = []
    model = load_model(
        saved(name)[0],
        ops=ReferenceOps(),
        layout=Layout(tp=2, ep=2),
        rank=1,
        progress=lambda done, total, _: seen.append((done, total)),
    )
    held = model.layers[-1].mlp.held  # type: ignore[attr-defined]
    of_experts = [name.split("experts.")[1].split(".")[0] for name in reads if "experts." in name]
    assert set(map(int, of_experts)) == set(held)
    assert set(reads.values()) == {1}
    assert seen[-1][0] == seen[-1][1]


def test_a_tensor_is_read_once_and_only_when_asked_for() -> None:
    reads: Counter[str] = Counter()
    with open_safetensors(saved("llama")[0]) as source:
        read = source.read

        def counted(name: str, index: tuple[slice, ...], dtype: torch.dtype) -> torch.Tensor:
            reads[name] += 1
            return read(name, index, dtype)

        source.read = counted  # type: ignore[method-assign]
        checklist = Checklist()
        wanted = Matrix("lm_head", 160, 64)
        checklist.linear(wanted)
        reader = Reader(source, ReferenceOps(), torch.float32, Layout(), 0)
        seen: list[tuple[int, int, str]] = []
        with reader.reading_ahead(checklist, 2, lambda *step: seen.append(step)):
            linear = reader.linear(wanted)
    assert reads == {"lm_head.weight": 1}
    assert seen == [(160 * 64 * 4, 160 * 64 * 4, "loading weights")]
    assert reader.nbytes == linear.nbytes


def test_progress_ends_at_its_total_and_may_stop_the_load(tmp_path: pathlib.Path) -> None:
    folder = saved("llama")[0]
    seen: list[tuple[int, int]] = []
    load_model(
        folder, ops=ReferenceOps(), progress=lambda done, total, _: seen.append((done, total))
    )
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 100_000

    class Enough(BaseException):
        pass

    def stop(done: int, total: int, what: str) -> None:
        if done > total // 2:
            raise Enough

    with pytest.raises(Enough):
        load_model(folder, ops=ReferenceOps(), progress=stop)
