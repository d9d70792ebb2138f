"""Blocks in one call have the bits of the operations they are made of, at every level."""

import gc
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from aserve import _native
from aserve.tensor.blocks import blocks_of
from aserve.tensor.native import NativeOps
from aserve.tensor.ops import Attend, KvLayer, open_ops
from aserve.tensor.rope import RopeTable
from tests.tensor.block_cases import (
    SIZES,
    Case,
    Sizes,
    attended_plainly,
    layer_plainly,
    longer,
    mixed_plainly,
    same_pools,
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_attention_blocks_have_the_bits_of_their_operations(
    ops: NativeOps, sizes: Sizes, adds: bool
) -> None:
    case = Case(ops, sizes)
    attend, plain = case.attend(), case.copied()
    rows = len(attend.positions_T)
    x, added = case.noise(rows, sizes.hidden), case.noise(rows, sizes.hidden) if adds else None
    total, out_TK = attended_plainly(case, x, added, plain, attend)
    step, part = case.blocks.step(attend, case.rope), case.attention_part
    wanted = {
        "whole": ops.linear(out_TK, part.out),
        "parts": ops.linear_parts(out_TK, part.out),
        "attended": out_TK,
    }
    for name, y in wanted.items():
        fresh = case.copied()
        got_total, got = getattr(case.attention, name)(x, added, fresh, step)
        assert torch.equal(got_total, total), name
        assert torch.equal(got, y), name
        assert same_pools(fresh, plain), name
        assert (got_total is x) is not adds


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
def test_mlp_blocks_have_the_bits_of_their_operations(
    ops: NativeOps, sizes: Sizes, rows: int
) -> None:
    case = Case(ops, sizes)
    x, added = case.noise(rows, sizes.hidden), case.noise(rows, sizes.hidden)
    total, normed, inner = mixed_plainly(case, x, added)
    whole, parts = (call(inner, case.mlp_part.down) for call in (ops.linear, ops.linear_parts))
    for got, y in ((case.mlp.whole(x, added), whole), (case.mlp.parts(x, added), parts)):
        assert torch.equal(got[0], total)
        assert torch.equal(got[1], y)
    assert torch.equal(case.mlp.gated(normed), whole)
    assert torch.equal(case.mlp.gated_parts(normed), parts)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("is_last", [False, True])
def test_a_stack_has_the_bits_of_its_operations(
    ops: NativeOps, sizes: Sizes, is_last: bool
) -> None:
    cases = [Case(ops, sizes, seed) for seed in range(3)]
    # One page table for all layers, as in a model; only what they hold differs.
    pools, plain = [[cases[0].copied() for _ in cases] for _ in range(2)]
    attend = cases[0].attend()
    x = cases[0].noise(len(attend.positions_T), sizes.hidden)
    before = x.clone()
    total, added = x, None
    for case, kv in zip(cases, plain, strict=True):
        total, added = layer_plainly(case, total, added, kv, attend)
    assert added is not None
    norm = 1 + cases[0].noise(sizes.hidden) if is_last else None
    wanted = ops.add(total, added)
    if norm is not None:
        wanted = ops.add_rms_norm(total, added, norm, 1e-6)[1]
    blocks = cases[0].blocks
    stack = blocks.stack([(case.attention, case.mlp) for case in cases], norm, 1e-6)
    step = blocks.step(attend, cases[0].rope)
    assert torch.equal(stack(x, pools, step), wanted)
    assert torch.equal(stack(x, pools, step), wanted), "the workspace remembers nothing"
    assert all(same_pools(a, b) for a, b in zip(pools, plain, strict=True))
    assert torch.equal(x, before)


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2, 3)])
def test_a_stack_leaves_what_enters_its_layers(ops: NativeOps, layers: tuple[int, ...]) -> None:
    cases = [Case(ops, SIZES[1], seed) for seed in range(4)]
    plain, pools = [[cases[0].copied() for _ in cases] for _ in range(2)]
    attend = cases[0].attend()
    x = cases[0].noise(len(attend.positions_T), SIZES[1].hidden)
    total, added, entering = x, None, []
    for case, kv in zip(cases, plain, strict=True):
        entering.append(total if added is None else ops.add(total, added))
        total, added = layer_plainly(case, total, added, kv, attend)
    blocks = cases[0].blocks
    stack = blocks.stack([(case.attention, case.mlp) for case in cases], None, 1e-6)
    step = blocks.step(attend, cases[0].rope)
    for _ in range(2):
        out, left = stack.capturing(x, pools, step, layers)
        assert torch.equal(out, stack(x, pools, step))
        assert len(left) == len(layers)
        for layer, rows in zip(layers, left, strict=True):
            assert torch.equal(rows, entering[layer]), layer


@pytest.mark.parametrize("layers", [(1,), (-1,), (0, 0)])
def test_only_layers_of_a_stack_are_captured(ops: NativeOps, layers: tuple[int, ...]) -> None:
    case = Case(ops, SIZES[0])
    stack = case.blocks.stack([(case.attention, case.mlp)], None, 1e-5)
    step = case.blocks.step(case.attend(), case.rope)
    with pytest.raises(ValueError, match="captured layers do not ascend, or are not in the stack"):
        stack.capturing(torch.randn(11, 64), [case.pool.kv], step, layers)


def test_a_row_has_the_same_bits_in_any_batch(ops: NativeOps) -> None:
    case = Case(ops, SIZES[4])
    attend = case.attend()
    x = case.noise(len(attend.positions_T), case.sizes.hidden)
    stack = case.blocks.stack([(case.attention, case.mlp)], None, 1e-5)
    together = stack(x, [case.pool.kv], case.blocks.step(attend, case.rope))
    starts = attend.row_start_M.tolist()
    for n in range(4):
        alone = case.blocks.step(case.attend((n,)), longer(case.rope))
        rows = slice(starts[n], starts[n + 1])
        assert torch.equal(stack(x[rows], [case.pool.kv], alone), together[rows])


def test_one_thread_and_many_have_the_same_bits(ops: NativeOps) -> None:
    outputs = []
    for threads in (1, 2, 5):
        case = Case(NativeOps(threads), SIZES[2])
        attend = case.attend()
        x = torch.linspace(-1, 1, len(attend.positions_T) * 96).view(-1, 96).contiguous()
        step = case.blocks.step(attend, case.rope)
        outputs.append(case.attention.whole(x, x, case.pool.kv, step)[1])
    assert all(torch.equal(outputs[0], other) for other in outputs)


def test_no_rows_are_no_work(ops: NativeOps) -> None:
    case, x = Case(ops, SIZES[0]), torch.empty(0, 64)
    none = torch.zeros(0, dtype=torch.int32)
    attend = Attend(none, none, none.view(0, 0), torch.zeros(1, dtype=torch.int32), none)
    step, before = case.blocks.step(attend, case.rope), case.copied()
    assert case.attention.parts(x, x, case.pool.kv, step)[1].shape == (2, 0, 64)
    stack = case.blocks.stack([(case.attention, case.mlp)], None, 1e-5)
    assert stack(x, [case.pool.kv], step).shape == (0, 64)
    assert stack.capturing(x, [case.pool.kv], step, (0,))[1][0].shape == (0, 64)
    assert same_pools(before, case.pool.kv)


def test_callers_on_several_threads_take_turns_with_the_workspace(ops: NativeOps) -> None:
    case = Case(ops, SIZES[4])
    attend = case.attend()
    x = case.noise(len(attend.positions_T), case.sizes.hidden)
    step = case.blocks.step(attend, case.rope)
    wanted = [case.attention.whole(x + n, x, case.pool.kv, step)[1] for n in range(3)]
    wrong: list[int] = []

    def repeat(n: int) -> None:
        own = case.copied()
        for _ in range(20):
            if not torch.equal(case.attention.whole(x + n, x, own, step)[1], wanted[n]):
                wrong.append(n)

    threads = [threading.Thread(target=repeat, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


BAD_STEPS: dict[str, Callable[[Attend, RopeTable], tuple[Attend, RopeTable]]] = {
    "slot -1 is outside": lambda a, r: (replace(a, slots_T=a.slots_T * 0 - 1), r),
    "slot 9999 is outside": lambda a, r: (replace(a, slots_T=a.slots_T * 0 + 9999), r),
    "slots is": lambda a, r: (replace(a, slots_T=a.slots_T[1:]), r),
    "positions is": lambda a, r: (replace(a, positions_T=a.positions_T.long()), r),
    "position 69 is outside": lambda a, r: (a, RopeTable(r.cos_sin_PR[:69])),
    "position is not below kv_len": lambda a, r: (replace(a, kv_len_N=a.kv_len_N - 1), r),
    "do not ascend": lambda a, r: (replace(a, positions_T=a.positions_T * 0), r),
    r"page \d+ is outside": lambda a, r: (replace(a, page_table_NP=a.page_table_NP + 999), r),
    "page table holds": lambda a, r: (replace(a, page_table_NP=a.page_table_NP[:, :1].clone()), r),
    "a page table of": lambda a, r: (replace(a, page_table_NP=a.page_table_NP[:2].clone()), r),
    "a page table is int32": lambda a, r: (replace(a, page_table_NP=a.page_table_NP.long()), r),
    "row_start is": lambda a, r: (replace(a, row_start_M=a.row_start_M[1:]), r),
    "row_start does not end": lambda a, r: (replace(a, row_start_M=a.row_start_M * 0), r),
    "rot is more than head_dim": lambda a, r: (a, RopeTable(torch.zeros(99, 18))),
    "rot is not an even": lambda a, r: (a, RopeTable(torch.zeros(99, 15))),
    "a rope table is": lambda a, r: (a, RopeTable(r.cos_sin_PR.double())),
}


@pytest.mark.parametrize("match", BAD_STEPS)
def test_a_step_that_reaches_outside_is_refused(ops: NativeOps, match: str) -> None:
    case = Case(ops, SIZES[0])
    x, before = torch.randn(11, 64), case.copied()
    stack = case.blocks.stack([(case.attention, case.mlp)], None, 1e-5)
    attend, rope = BAD_STEPS[match](case.attend(), case.rope)
    for run in (
        lambda step: case.attention.whole(x, None, case.pool.kv, step),
        lambda step: case.attention.attended(x, None, case.pool.kv, step),
        lambda step: stack(x, [case.pool.kv], step),
    ):
        with pytest.raises(ValueError, match=match):
            run(case.blocks.step(attend, rope))
    assert same_pools(before, case.pool.kv)


def test_rows_and_pools_that_do_not_fit_are_refused(ops: NativeOps) -> None:
    case, other = Case(ops, SIZES[0]), Case(ops, SIZES[3])
    blocks, kv, x = case.blocks, case.pool.kv, torch.randn(11, 64)
    step, pair = blocks.step(case.attend(), case.rope), (case.attention, case.mlp)
    stack = blocks.stack([pair, pair], None, 1e-5)
    fewer = KvLayer(kv.k_PSHD[:-1], kv.v_PSHD[:-1])
    mixed = KvLayer(kv.k_PSHD, kv.v_PSHD.float())
    alone = blocks.mlp(replace(case.mlp_part, norm_H=None))
    refusals = {
        "5 rows in a step of 11": lambda: case.attention.whole(x[:5], None, kv, step),
        "x has 63 columns": lambda: case.attention.whole(torch.randn(11, 63), None, kv, step),
        "x is torch.float64": lambda: case.mlp.whole(x.double(), x),
        "the same float32 shape": lambda: case.mlp.whole(x, x[:5]),
        "added .* not contiguous": lambda: case.mlp.whole(x, torch.randn(64, 11).T),
        "as many pools as layers": lambda: stack(x, [kv], step),
        "layers differ in pages": lambda: stack(x, [kv, fewer], step),
        "k pages are": lambda: stack(x, [kv, mixed], step),
        "do not fit the heads": lambda: case.attention.parts(x, x, other.pool.kv, step),
        "without a norm": lambda: alone.whole(x, x),
        "a stack of no layers": lambda: _native.Stack([], 0, 1e-5),
        "layers differ in columns": lambda: blocks.stack(
            [pair, (other.attention, other.mlp)], None, 1e-5
        ),
        "does not fit the heads": lambda: blocks.attention(replace(case.attention_part, heads=6)),
        "both or neither": lambda: blocks.attention(
            replace(case.attention_part, q_norm_D=torch.ones(16))
        ),
        "norm weight": lambda: blocks.mlp(replace(case.mlp_part, norm_H=torch.ones(63))),
        "do not fit down": lambda: blocks.mlp(
            replace(case.mlp_part, gate_up=case.attention_part.out)
        ),
    }
    for match, call in refusals.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_a_stack_keeps_its_weights_alive(ops: NativeOps) -> None:
    case = Case(ops, SIZES[0])
    part = replace(case.mlp_part, gate_up=case.packed(192, 64, 1))
    stack = case.blocks.stack([(case.attention, case.blocks.mlp(part))], None, 1e-5)
    step, pools = case.blocks.step(case.attend(), case.rope), [case.pool.kv]
    x = torch.randn(11, 64)
    before = stack(x, pools, step)
    del part
    gc.collect()
    # Of the size that was freed, if it was.
    refill = [case.packed(192, 64, 1) for _ in range(8)]
    assert torch.equal(stack(x, pools, step), before)
    assert refill


def test_blocks_come_with_native_operations_unless_opened_without() -> None:
    assert blocks_of(open_ops("native", 1)) is not None
    assert blocks_of(open_ops("native", 1, fused=False)) is None
    assert blocks_of(open_ops("reference", 1)) is None
