"""GGUF checkpoints: every quantisation by an independent formula, every architecture whole."""

import pathlib
import struct
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from aserve.errors import ModelError
from aserve.models.registry import load_model, load_spec
from aserve.models.weights.gguf import KINDS, GgufSource
from aserve.tensor.ops import open_ops
from aserve.text.gguf_file import open_gguf
from tests.models.families import LLAMA3, YARN, build, oracle_greedy, oracle_logits, prompt, saved
from tests.models.gguf_writing import write_gguf
from tests.models.paged import Paged

OPS = open_ops("native", 1)


def half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def q8_0(block: bytes) -> list[float]:
    return [half(block, 0) * q for q in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[float]:
    nibbles = [q & 15 for q in block[2:]] + [q >> 4 for q in block[2:]]
    return [half(block, 0) * (q - 8) for q in nibbles]


def q4_1(block: bytes) -> list[float]:
    nibbles = [q & 15 for q in block[4:]] + [q >> 4 for q in block[4:]]
    return [half(block, 0) * q + half(block, 2) for q in nibbles]


def q4_k(block: bytes) -> list[float]:
    scale, least, packed, quants = half(block, 0), half(block, 2), block[4:16], block[16:]
    out = []
    for part in range(8):  # of 32 values
        if part < 4:
            factor, offset = packed[part] & 63, packed[part + 4] & 63
        else:
            factor = packed[part + 4] & 15 | packed[part - 4] >> 6 << 4
            offset = packed[part + 4] >> 4 | packed[part] >> 6 << 4
        for byte in quants[part // 2 * 32 : part // 2 * 32 + 32]:
            q = byte >> 4 if part % 2 else byte & 15
            out.append(scale * factor * q - least * offset)
    return out


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    out = []
    for at in range(256):
        part, inside = divmod(at, 128)
        row, column = divmod(inside, 32)
        byte = low[part * 64 + (row % 2) * 32 + column]
        nibble = byte >> 4 if row >= 2 else byte & 15
        q = nibble | (high[part * 32 + column] >> 2 * row & 3) << 4
        out.append(half(block, 208) * scales[part * 8 + row * 2 + column // 16] * (q - 32))
    return out


FORMULAS: dict[Kind, Callable[[bytes], list[float]]] = {
    Kind.F32: lambda block: list(struct.unpack("<f", block)),
    Kind.F16: lambda block: list(struct.unpack("<e", block)),
    Kind.BF16: lambda block: list(struct.unpack("<f", b"\0\0" + block)),
    Kind.Q8_0: q8_0,
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q4_K: q4_k,
    Kind.Q6_K: q6_k,
}


def random_blocks(kind: Kind, n_blocks: int) -> np.ndarray:
    """Any bits are valid quants; numbers stored as such are kept finite and small."""
    rng = np.random.default_rng(int(kind))
    n_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    if kind == Kind.F32:
        return rng.standard_normal(n_blocks, dtype=np.float32).view(np.uint8).reshape(n_blocks, 4)
    raw = rng.integers(0, 256, (n_blocks, n_bytes), dtype=np.uint8)
    halves = {Kind.Q4_1: (0, 2), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,), Kind.BF16: ()}.get(
        kind, (0,)
    )
    for at in halves:
        values = rng.uniform(-0.1, 0.1, n_blocks).astype(np.float16)
        raw[:, at : at + 2] = values.view(np.uint8).reshape(n_blocks, 2)
    if kind == Kind.BF16:
        raw[:, 1] = 0x3E | raw[:, 1] & 0x80
    return raw


def source_of(path: pathlib.Path, name: str, raw: np.ndarray, kind: Kind) -> GgufSource:
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_head_count(2)
    writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufSource(open_gguf(path))


@pytest.mark.parametrize("kind", sorted(KINDS), ids=lambda kind: kind.name)
def test_every_kind_of_block_is_what_its_formula_says(kind: Kind, tmp_path: pathlib.Path) -> None:
    block_len = gguf.GGML_QUANT_SIZES[kind][0]
    rows, columns = 6, 512
    blocks = random_blocks(kind, rows * columns // block_len)
    wanted = [value for block in blocks for value in FORMULAS[kind](block.tobytes())]
    source = source_of(tmp_path / "x.gguf", "token_embd.weight", blocks.reshape(rows, -1), kind)
    name = "model.embed_tokens.weight"
    entry = source.entries[name]
    assert (entry.shape, entry.kind) == ((rows, columns), kind.name)
    whole = source.read(name, (slice(0, rows), slice(0, columns)), torch.float32)
    expected = torch.tensor(wanted, dtype=torch.float64).view(rows, columns)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-6, atol=1e-7)
    part = source.read(name, (slice(2, 5), slice(100, 301)), torch.bfloat16)
    assert torch.equal(part, whole[2:5, 100:301].bfloat16())


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "llama-biases", "llama-wide-heads", "llama-rope-yarn"),
        *("llama-rope-linear", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral"),
    ],
)
def test_a_model_written_as_gguf_gives_the_same_text(name: str, tmp_path: pathlib.Path) -> None:
    oracle = saved(name)[1]
    if name == "qwen3-moe":  # llama.cpp's form of it has experts in every layer
        oracle = build(name, mlp_only_layers=[])
    path = write_gguf(oracle, tmp_path / "model.gguf")
    model = load_model(path, ops=OPS)
    assert model.spec.dtype == torch.float32
    tokens = prompt(40)
    logits = Paged(model).step((0, tokens))[0]
    assert (logits - oracle_logits(oracle, tokens)).abs().max() < 1e-4
    assert Paged(model).greedy(tokens[:9], 8) == oracle_greedy(oracle, tokens[:9], 8)


def test_experts_may_stand_alone_in_the_file(tmp_path: pathlib.Path) -> None:
    oracle = saved("mixtral")[1]
    stacked = write_gguf(oracle, tmp_path / "stacked.gguf")
    alone = write_gguf(oracle, tmp_path / "alone.gguf", stacked_experts=False)
    tokens = prompt(20)
    one, other = (
        Paged(load_model(path, ops=OPS)).step((0, tokens))[0] for path in (stacked, alone)
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.F16, Kind.BF16])
def test_quantised_weights_run_in_bfloat16(kind: Kind, tmp_path: pathlib.Path) -> None:
    oracle = build("llama")
    path = write_gguf(oracle, tmp_path / "model.gguf", kind)
    with torch.no_grad():
        for parameter in oracle.parameters():
            if parameter.dim() > 1:
                quantised = gguf.quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(gguf.dequantize(quantised, kind)))
    model = load_model(path, ops=OPS)
    assert model.spec.dtype == torch.bfloat16
    tokens = prompt(30)
    exact = oracle_logits(oracle, tokens)
    wide = Paged(load_model(path, ops=OPS, dtype="float32")).step((0, tokens))[0]
    assert (wide - exact).abs().max() < 1e-4
    logits = Paged(model).step((0, tokens))[0]
    assert torch.nn.functional.cosine_similarity(logits, exact).min() > 0.998


def test_rope_divisors_are_llama3_scaling(tmp_path: pathlib.Path) -> None:
    """llama.cpp writes the scaling of Llama 3 as one divisor for each frequency."""
    oracle = saved("llama-rope-llama3")[1]
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    scaled = oracle.model.rotary_emb.inv_freq
    divisors = (plain / scaled).numpy()
    assert divisors.max() > 3.9
    path = write_gguf(oracle, tmp_path / "model.gguf", extra={"rope_freqs.weight": divisors})
    tokens = prompt(75)
    logits = Paged(load_model(path, ops=OPS)).step((0, tokens))[0]
    assert (logits - oracle_logits(oracle, tokens)).abs().max() < 1e-4


def test_metadata_becomes_the_spec(tmp_path: pathlib.Path) -> None:
    spec = load_spec(write_gguf(saved("llama-rope-yarn")[1], tmp_path / "model.gguf"))
    assert (spec.hidden, spec.inner, spec.layers, spec.heads, spec.kv_heads) == (64, 128, 3, 4, 2)
    assert (spec.head_dim, spec.vocab, spec.context_len, spec.tied) == (16, 160, 256, False)
    assert spec.eps == 1e-6
    assert spec.rope["rope_type"] == "yarn"
    assert spec.rope["factor"] == YARN["factor"] == LLAMA3["factor"]


def written(path: pathlib.Path, arch: str, fields: dict[str, object]) -> pathlib.Path:
    """A file of metadata alone."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)  # type: ignore[arg-type]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_of_the_wrong_kind_is_refused_with_all_findings(tmp_path: pathlib.Path) -> None:
    fields = {
        "llama.attention.head_count": [4, 2],
        "llama.embedding_length": "wide",
        "llama.rope.dimension_count": 16,
        "llama.block_count": 2000,
        "llama.feed_forward_length": [128, 128],
    }
    with pytest.raises(ModelError) as caught:
        load_spec(written(tmp_path / "x.gguf", "llama", fields))
    text = str(caught.value)
    for finding in ("num_attention_heads is [4, 2]", "hidden_size is 'wide'", "at most 1024"):
        assert finding in text
    assert "intermediate_size" not in text, "the same for all layers is as good as once"


def test_a_part_of_a_file_says_how_to_join(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "x.gguf", "llama", {"split.count": 3})
    with pytest.raises(ModelError, match=r"one of 3 parts.*--merge"):
        load_spec(path)


def test_tensors_of_unknown_names_are_surplus(tmp_path: pathlib.Path) -> None:
    extra = {"odd": np.zeros((2, 2), np.float32), "blk.0.odd.weight": np.zeros((2, 2), np.float32)}
    path = write_gguf(saved("llama")[1], tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=r"2 surplus:\n  blk\.0\.odd\.weight\n  odd"):
        load_model(path, ops=OPS)


def test_an_unknown_architecture_names_the_known_ones(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"'gemma3'.* llama, qwen2, qwen3, qwen3moe"):
        load_spec(written(tmp_path / "x.gguf", "gemma3", {}))


def test_an_unknown_quantisation_names_the_known_ones(tmp_path: pathlib.Path) -> None:
    blocks = np.zeros((4, 2 * gguf.GGML_QUANT_SIZES[Kind.Q5_0][1]), dtype=np.uint8)
    with pytest.raises(ModelError, match=r"uses Q5_0, not supported: know F32.*Q6_K"):
        source_of(tmp_path / "x.gguf", "token_embd.weight", blocks, Kind.Q5_0)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(saved("llama")[1], path).read_bytes()


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 100, 700, 3000, -1])
def test_a_file_cut_anywhere_is_refused(
    kept: int, whole_file: bytes, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_file[:kept])
    with pytest.raises(ModelError, match=r"cut\.gguf"):
        load_model(path, ops=OPS)


def test_a_file_with_wild_lengths_is_refused_or_read_but_never_runs_away(
    whole_file: bytes, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "wild.gguf"
    n_refused = 0
    for at in range(8, 400):
        path.write_bytes(whole_file[:at] + b"\xff" * 6 + whole_file[at + 6 :])
        try:
            open_gguf(path)
        except ModelError:
            n_refused += 1
    assert n_refused > 300


def test_a_file_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(200))
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_model(path, ops=OPS)
