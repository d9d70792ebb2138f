"""Blocks of a file as they are handed on: each type by its formula, rows and columns in their
places."""

import pathlib

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from aserve.errors import ModelError
from aserve.models.weights.blocks import BLOCK_BYTES, KEPT, columns, q4_1_of_q4_0, q4_1_of_q4_k
from aserve.models.weights.gguf import KINDS, GgufSource
from aserve.models.weights.reading import read_blocks
from aserve.models.weights.safetensors import open_safetensors
from aserve.models.weights.source import Source
from aserve.text.gguf_file import open_gguf
from tests.models.families import build, saved
from tests.models.gguf_writing import quantised, write_gguf
from tests.models.test_gguf import FORMULAS, random_blocks, source_of

NAME = "model.embed_tokens.weight"
ROWS, K = 6, 512


def values(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), Kind[kind]))


def whole(source: Source, name: str = NAME) -> tuple[slice, slice]:
    rows, columns = source.entries[name].shape
    return slice(0, rows), slice(0, columns)


def source_with(kind: Kind, path: pathlib.Path) -> GgufSource:
    blocks = random_blocks(kind, ROWS * K // gguf.GGML_QUANT_SIZES[kind][0])
    return source_of(path / "x.gguf", "token_embd.weight", blocks.reshape(ROWS, -1), kind)


@pytest.mark.parametrize("stored", list(KEPT))
def test_blocks_hold_what_the_formula_of_their_type_says(
    stored: str, tmp_path: pathlib.Path
) -> None:
    source, kind = source_with(Kind[stored], tmp_path), KEPT[stored]
    got = source.read_blocks(NAME, whole(source))
    assert (got.dtype, got.shape) == (torch.uint8, (ROWS, K // 32 * BLOCK_BYTES[kind]))
    raw = source._file.raw("token_embd.weight").reshape(-1, gguf.GGML_QUANT_SIZES[Kind[stored]][1])
    wanted = [value for block in raw for value in FORMULAS[Kind[stored]](block.tobytes())]
    expected = torch.tensor(wanted, dtype=torch.float64).view(ROWS, K)
    # Exactly, but that the two factors of Q4_K have become one float16 each.
    tolerance = {"rtol": 0, "atol": 2e-7}
    if stored == "Q4_K":
        tolerance["atol"] = 0.1 * 63 * (15 + 1) * 2**-11
    torch.testing.assert_close(values(got, kind).double(), expected, **tolerance)


@pytest.mark.parametrize("stored", list(KEPT))
def test_a_part_is_cut_from_the_whole(stored: str, tmp_path: pathlib.Path) -> None:
    source, kind = source_with(Kind[stored], tmp_path), KEPT[stored]
    part = source.read_blocks(NAME, (slice(2, 5), slice(96, 352)))
    cut = columns(source.read_blocks(NAME, whole(source)).numpy(), kind, slice(96, 352))[2:5]
    assert part.is_contiguous()
    assert np.array_equal(part.numpy(), cut)
    assert torch.equal(values(part, kind), values(torch.from_numpy(cut.copy()), kind))


def test_the_types_that_stay_in_blocks_are_known_types() -> None:
    assert set(KEPT) < {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q6_K])
def test_other_types_have_no_blocks(kind: Kind, tmp_path: pathlib.Path) -> None:
    source = source_with(kind, tmp_path)
    with pytest.raises(ValueError, match=f"{kind.name}, which has no blocks"):
        source.read_blocks(NAME, whole(source))
    with (
        open_safetensors(saved("llama")[0]) as tensors,
        pytest.raises(ValueError, match="F32, which has no blocks"),
    ):
        tensors.read_blocks(NAME, whole(tensors))


def test_centred_4_bits_become_the_same_numbers_with_a_minimum() -> None:
    raw = random_blocks(Kind.Q4_0, 40).reshape(5, -1)
    same = values(torch.from_numpy(q4_1_of_q4_0(raw)), "Q4_1")
    assert torch.equal(same, values(torch.from_numpy(raw), "Q4_0"))


def test_every_factor_of_a_superblock_is_at_most_half_a_float16_off() -> None:
    raw = random_blocks(Kind.Q4_K, 64).reshape(8, -1)
    blocks = q4_1_of_q4_k(raw).reshape(-1, 8, 20)
    halves = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float64)
    head = raw.reshape(-1, 144)
    two = np.ascontiguousarray(head[:, :4]).view(np.float16).astype(np.float64)
    scale, least = gguf.quants.Q4_K.get_scale_min(head[:, 4:16].copy())
    for got, wanted in (
        (halves[..., 0], two[:, :1] * scale),
        (halves[..., 1], -two[:, 1:] * least),
    ):
        assert (np.abs(got - wanted) <= np.abs(wanted) * 2**-11 + 2**-25).all()


def test_a_factor_too_large_for_float16_is_refused_by_the_tensor_s_name(
    tmp_path: pathlib.Path,
) -> None:
    raw = random_blocks(Kind.Q4_K, ROWS * 2)
    raw[5, :2] = np.array([60000], np.float16).view(np.uint8)
    raw[5, 4:8] = 63
    source = source_of(tmp_path / "x.gguf", "token_embd.weight", raw.reshape(ROWS, -1), Kind.Q4_K)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight .*float16; --weights bf16"):
        read_blocks(source, NAME, whole(source), "Q4_1")


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
def test_numbers_that_cannot_be_converted_are_refused_by_the_tensor_s_name(
    value: float, tmp_path: pathlib.Path
) -> None:
    x = np.ones((4, 64), np.float32)
    x[3, 3] = value
    raw = x.view(np.uint8)
    source = source_of(tmp_path / "x.gguf", "token_embd.weight", raw, Kind.F32)
    for kind in ("Q8_0", "Q4_1"):
        with pytest.raises(ModelError, match=r"x\.gguf: model\.embed_tokens\.weight holds numbers"):
            read_blocks(source, NAME, whole(source), kind)


@pytest.mark.parametrize("to", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", sorted(KINDS), ids=lambda kind: kind.name)
def test_any_type_becomes_blocks_near_its_numbers_whatever_the_part(
    kind: Kind, to: str, tmp_path: pathlib.Path
) -> None:
    source = source_with(kind, tmp_path)
    got = read_blocks(source, NAME, whole(source), to)  # type: ignore[arg-type]
    numbers = source.read(NAME, whole(source), torch.float32)
    off = (values(got, to) - numbers).view(ROWS, -1, 32).abs().amax(-1)
    span = numbers.view(ROWS, -1, 32).aminmax(dim=-1)
    most = torch.maximum(span.max, -span.min) / 127 if to == "Q8_0" else (span.max - span.min) / 15
    # Half a step; a fit by least squares may move one value further to bring others nearer.
    assert (off <= most * (0.51 if to == "Q8_0" else 1.5) + 1e-3 * span.max.abs()).all()
    part = (slice(1, 4), slice(64, 320))
    cut = columns(got.numpy(), to, part[1])[part[0]]  # type: ignore[arg-type]
    assert np.array_equal(read_blocks(source, NAME, part, to).numpy(), cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K])
@pytest.mark.parametrize("name", ["llama-wide-heads", "mixtral", "qwen2"])
def test_rows_and_experts_stand_where_hugging_face_has_them(
    name: str, kind: Kind, tmp_path: pathlib.Path
) -> None:
    """Rows of q and k are put back in order, stacks are taken apart."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = build(name, **sizes)
    source = GgufSource(open_gguf(write_gguf(model, tmp_path / "model.gguf", kind)))
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    at = "model.layers.1"
    names = [f"{at}.self_attn.{part}_proj" for part in "qkvo"]
    wanted = {f"{one}.weight": state[f"{one}.weight"] for one in names}
    if name == "mixtral":
        stack = state[f"{at}.mlp.experts.gate_up_proj"]
        wanted[f"{at}.block_sparse_moe.experts.2.w3.weight"] = stack[2, stack.shape[1] // 2 :]
    for key, numbers in wanted.items():
        exact = torch.from_numpy(gguf.dequantize(quantised(numbers, kind), kind))
        assert torch.equal(source.read(key, whole(source, key), torch.float32), exact), key
        blocks = source.read_blocks(key, whole(source, key))
        atol = 2e-3 if kind == Kind.Q4_K else 0
        torch.testing.assert_close(values(blocks, KEPT[kind.name]), exact, rtol=0, atol=atol)
        rows = slice(5, 37)
        part = source.read_blocks(key, (rows, slice(0, numbers.shape[1])))
        assert torch.equal(part, blocks[rows])
