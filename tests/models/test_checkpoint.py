"""Checkpoints in Hugging Face layout: configs old and new, shards, and all that can be wrong."""

import json
import logging
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from aserve.errors import ConfigError, ModelError
from aserve.models.registry import ARCHITECTURES, load_model, load_spec
from aserve.tensor.reference import ReferenceOps
from tests.models.families import oracle_logits, prompt, saved
from tests.models.paged import Paged

OPS = ReferenceOps()
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a tiny llama that a test may damage."""
    return pathlib.Path(shutil.copytree(saved("llama")[0], tmp_path / "model"))


def edit_config(folder: pathlib.Path, name: str = "config.json", **changes: Any) -> None:
    path = folder / name
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def tensors_of(folder: pathlib.Path) -> Tensors:
    return safetensors.torch.load_file(folder / "model.safetensors")


def write_shards(folder: pathlib.Path, tensors: Tensors, n_shards: int = 3) -> dict[str, str]:
    (folder / "model.safetensors").unlink()
    placed = {
        name: f"model-{i % n_shards + 1:05}-of-{n_shards:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in set(placed.values()):
        part = {name: tensor for name, tensor in tensors.items() if placed[name] == file}
        safetensors.torch.save_file(part, folder / file)
    write_index(folder, placed)
    return placed


def write_index(folder: pathlib.Path, placed: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_give_what_one_file_gives(folder: pathlib.Path) -> None:
    write_shards(folder, tensors_of(folder))
    tokens = prompt(20)
    logits = Paged(load_model(folder, ops=OPS)).step((0, tokens))[0]
    assert (logits - oracle_logits(saved("llama")[1], tokens)).abs().max() < 1e-4


def test_a_missing_shard_is_named(folder: pathlib.Path) -> None:
    write_shards(folder, tensors_of(folder))
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        load_model(folder, ops=OPS)


def test_an_index_that_promises_too_much_is_refused(folder: pathlib.Path) -> None:
    placed = write_shards(folder, tensors_of(folder))
    write_index(folder, placed | {"model.ghost": "model-00001-of-00003.safetensors"})
    with pytest.raises(ModelError, match=r"promises model\.ghost"):
        load_model(folder, ops=OPS)


def test_an_index_may_not_reach_out_of_its_folder(folder: pathlib.Path) -> None:
    placed = write_shards(folder, tensors_of(folder))
    write_index(folder, placed | {"model.norm.weight": "../other.safetensors"})
    with pytest.raises(ModelError, match="not a file beside it"):
        load_model(folder, ops=OPS)


def test_one_error_lists_all_that_does_not_fit(folder: pathlib.Path) -> None:
    tensors = tensors_of(folder)
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(48, 64)
    tensors["model.layers.0.self_attn.q_proj.scale"] = torch.zeros(1)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load_model(folder, ops=OPS)
    assert caught.value.findings[1:] == (
        "2 missing:",
        "  model.layers.1.mlp.up_proj.weight",
        "  model.norm.weight",
        "1 misshapen:",
        "  model.layers.0.self_attn.k_proj.weight is [48, 64], should be [32, 64]",
        "1 surplus:",
        "  model.layers.0.self_attn.q_proj.scale",
    )


def test_a_long_list_is_cut_with_a_count(folder: pathlib.Path) -> None:
    edit_config(folder, num_hidden_layers=9)
    with pytest.raises(ModelError) as caught:
        load_model(folder, ops=OPS)
    assert caught.value.findings[1] == "54 missing:"
    assert caught.value.findings[-1] == "  ... and 42 more"
    assert len(caught.value.findings) == 15


def test_harmless_extras_are_let_be(tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(saved("llama-tied")[0], tmp_path / "model"))
    tensors = tensors_of(folder)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    load_model(folder, ops=OPS)
    tensors["lm_head.weight"] = torch.zeros(7, 64)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match="1 surplus:\n  lm_head"):
        load_model(folder, ops=OPS)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_file_that_is_cut_off_is_refused(folder: pathlib.Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors is cut off or corrupt"):
        load_model(folder, ops=OPS)


def test_integers_are_no_weights(folder: pathlib.Path) -> None:
    tensors = tensors_of(folder)
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is I8; know F64, F32, BF16, F16"):
        load_model(folder, ops=OPS)


def test_a_folder_of_pickles_says_why_not(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is pickle"):
        load_model(folder, ops=OPS)


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float16, "auto", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bf16", torch.bfloat16),
    ],
)
def test_the_dtype_follows_the_file_unless_asked(
    folder: pathlib.Path, stored: torch.dtype, asked: Any, used: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in tensors_of(folder).items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    model = load_model(folder, ops=OPS, dtype=asked)
    assert model.spec.dtype == used == model.layers[0].attention.qkv.dtype == model.table.dtype
    assert model.norm.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama-rope-llama3", "llama-rope-yarn", "llama-rope-linear"])
def test_a_config_of_transformers_4_means_the_same(name: str, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(saved(name)[0], tmp_path / "model"))
    new = load_spec(folder)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(
        folder, rope_parameters=..., dtype=..., rope_theta=theta, rope_scaling=rope, torch_dtype="x"
    )
    assert load_spec(folder) == new
    rope["type"] = rope.pop("rope_type")  # before 4.43
    edit_config(folder, rope_scaling=rope)
    assert load_spec(folder) == new


def test_fields_that_old_configs_lack_have_their_old_meaning(folder: pathlib.Path) -> None:
    edit_config(
        folder, num_key_value_heads=..., head_dim=..., tie_word_embeddings=..., mlp_bias=...
    )
    spec = load_spec(folder)
    assert (spec.kv_heads, spec.head_dim, spec.tied, spec.mlp_bias) == (4, 16, False, False)


def test_end_tokens_come_from_both_configs(folder: pathlib.Path) -> None:
    edit_config(folder, "generation_config.json", eos_token_id=[7, 9])
    assert load_spec(folder).eos_ids == (7, 9, 2)
    edit_config(folder, eos_token_id=[9])
    assert load_spec(folder).eos_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    assert load_spec(folder).eos_ids == (9,)


@pytest.mark.parametrize("given", [["GPT2LMHeadModel"], None, 7])
def test_an_unknown_architecture_names_the_known_ones(folder: pathlib.Path, given: Any) -> None:
    edit_config(folder, architectures=given, model_type="gpt2")
    with pytest.raises(ModelError, match=r"(GPT2LMHeadModel|gpt2), which") as caught:
        load_model(folder, ops=OPS)
    for known in ARCHITECTURES:
        assert known in str(caught.value)


def test_a_bad_config_is_refused_with_all_findings(folder: pathlib.Path) -> None:
    edit_config(
        folder,
        hidden_size="64",
        num_attention_heads=5,
        rms_norm_eps=-1,
        hidden_act="gelu",
        tie_word_embeddings="no",
        rope_parameters={"rope_type": "spiral", "rope_theta": 1e4},
        quantization_config={"quant_method": "gptq"},
    )
    with pytest.raises(ModelError) as caught:
        load_spec(folder)
    text = str(caught.value)
    for finding in (
        "hidden_size is '64'",
        "5 heads do not share 2 KV heads",
        "rms_norm_eps is -1",
        "'gelu' is not supported",
        "tie_word_embeddings is 'no'",
        "'spiral' is not supported",
        "quantised (gptq)",
    ):
        assert finding in text


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_a_config_that_is_no_object_is_refused(folder: pathlib.Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(folder)


def test_no_config_is_no_model(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize(
    ("arch", "fields", "context_len"),
    [
        ("MistralForCausalLM", {"sliding_window": 100}, 100),
        ("MistralForCausalLM", {"sliding_window": None}, 256),
        ("MistralForCausalLM", {"sliding_window": 4096}, 256),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": True}, 100),
        ("Qwen2ForCausalLM", {"sliding_window": 100, "use_sliding_window": False}, 256),
        ("Qwen2ForCausalLM", {"sliding_window": 100}, 256),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 3,
            },
            256,
        ),
    ],
)
def test_a_sliding_window_caps_the_context_and_says_so(
    folder: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
    arch: str,
    fields: dict[str, Any],
    context_len: int,
) -> None:
    edit_config(folder, architectures=[arch], **fields)
    with caplog.at_level(logging.WARNING, "aserve.models"):
        assert load_spec(folder).context_len == context_len
    assert ("window of 100 tokens" in caplog.text) is (context_len == 100)


def test_too_few_experts_are_refused(tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(saved("mixtral")[0], tmp_path / "model"))
    edit_config(folder, num_local_experts=1)
    with pytest.raises(ConfigError, match="2 of 1 experts cannot be chosen"):
        load_spec(folder)
