"""Which weights are held in blocks: of types, sizes and cuts, the same on every rank."""

import itertools

import pytest

from aserve.core.config import Layout
from aserve.models.decoder import row_blocks
from aserve.models.split import WHOLE, Split
from aserve.models.weights.blocks import BLOCK_BYTES
from aserve.models.weights.forms import Conversion, Group, kind_of

ONE = Layout()
ROWS = Split(0, ("tp",))


def kind(to: Conversion | None, *types: str, coarsest: str = "q4") -> str | None:
    group = Group(types, 64, ROWS, coarsest=coarsest)  # type: ignore[arg-type]
    return kind_of(group, types, to, ONE)


@pytest.mark.parametrize(
    ("types", "keep", "int8", "q4"),
    [
        (("Q8_0",), "Q8_0", "Q8_0", "Q4_1"),
        (("Q4_0",), "Q4_0", "Q4_0", "Q4_0"),
        (("Q4_1",), "Q4_1", "Q4_1", "Q4_1"),
        (("Q4_K",), "Q4_1", "Q4_1", "Q4_1"),
        (("Q6_K",), None, "Q8_0", "Q4_1"),
        (("F16",), None, "Q8_0", "Q4_1"),
        (("BF16",), None, "Q8_0", "Q4_1"),
        (("F32",), None, "Q8_0", "Q4_1"),
        # Parts of one weight: one kind for all.
        (("Q4_1", "Q4_1", "Q4_K"), "Q4_1", "Q4_1", "Q4_1"),
        (("Q4_0", "Q4_0"), "Q4_0", "Q4_0", "Q4_0"),
        (("Q4_0", "Q4_1"), "Q4_1", "Q4_1", "Q4_1"),  # which can hold the other's numbers
        (("Q4_0", "Q4_0", "Q8_0"), None, "Q8_0", "Q4_1"),
        (("Q4_K", "Q4_K", "Q6_K"), None, "Q8_0", "Q4_1"),
        (("Q8_0", "F16"), None, "Q8_0", "Q4_1"),
    ],
)
def test_blocks_are_kept_and_made_as_types_say(
    types: tuple[str, ...], keep: str | None, int8: str, q4: str
) -> None:
    assert kind("keep", *types) == keep
    assert kind("int8", *types) == int8
    assert kind("q4", *types) == q4
    assert kind("bf16", *types) is None
    assert kind(None, *types) is None


TYPES = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")


def test_a_conversion_makes_nothing_larger() -> None:
    order: tuple[Conversion, ...] = ("keep", "int8", "q4")
    bytes_of = {None: 64, **BLOCK_BYTES}
    for types in itertools.product(TYPES, repeat=2):
        sizes = [bytes_of[kind(to, *types)] for to in order]  # type: ignore[index]
        assert sizes == sorted(sizes, reverse=True), types


def test_a_head_is_not_made_of_4_bits_and_a_router_not_of_blocks() -> None:
    assert [kind(to, "BF16", coarsest="int8") for to in ("keep", "int8", "q4")] == [
        *(None, "Q8_0", "Q8_0")
    ]
    assert kind("q4", "Q4_0", coarsest="int8") == "Q4_0", "the file has it so"
    assert [kind(to, "F32", coarsest="bf16") for to in ("keep", "int8", "q4")] == [None] * 3
    assert kind("q4", "Q8_0", coarsest="bf16") == "Q8_0", "the file has it so"


@pytest.mark.parametrize(
    ("k", "blocks", "fits"),
    [(32, 1, True), (64, 2, True), (48, 1, False), (96, 2, False), (576, 3, True), (16, 1, False)],
)
def test_every_row_block_is_of_whole_blocks(k: int, blocks: int, fits: bool) -> None:
    group = Group(("w",), k, WHOLE, blocks)
    for layout in (ONE, Layout(tp=2), Layout(tp=2, numerics="fast")):
        assert (kind_of(group, ["Q8_0"], "keep", layout) is not None) is fits


def columns(k: int) -> Group:
    units = row_blocks(k)
    return Group(("down",), k, Split(1, ("tp",), units=units, exact_only=True), units)


@pytest.mark.parametrize("k", [64, 96, 128, 576, 1152, 1536, 4096, 11008])
def test_exact_layouts_decide_as_one_rank(k: int) -> None:
    alone = kind_of(columns(k), ["Q4_1"], "keep", ONE)
    sizes = [size for size in range(2, 13) if row_blocks(k) % size == 0]
    assert sizes or k == 64
    for size in sizes:
        assert kind_of(columns(k), ["Q4_1"], "keep", Layout(tp=size)) == alone


@pytest.mark.parametrize(("tp", "fits"), [(2, True), (3, True), (5, True), (7, True), (48, False)])
def test_fast_layouts_cut_mlps_at_blocks_where_there_are_enough(tp: int, fits: bool) -> None:
    layout = Layout(tp=tp, numerics="fast")
    assert (kind_of(columns(1024), ["Q8_0"], "keep", layout) is not None) is fits


def test_a_fast_layout_that_cuts_a_block_takes_numbers() -> None:
    heads = Split(1, ("attn_tp",), units=8)  # of 16 columns
    group = Group(("o",), 128, heads, 2)
    assert kind_of(group, ["Q8_0"], "keep", Layout(tp=4, numerics="fast")) == "Q8_0"
    assert kind_of(group, ["Q8_0"], "keep", Layout(tp=8, numerics="fast")) is None


def test_rows_may_be_cut_anywhere() -> None:
    group = Group(("w",), 64, ROWS)
    assert kind_of(group, ["Q8_0"], "keep", Layout(tp=7)) == "Q8_0"
