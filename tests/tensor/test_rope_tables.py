"""Rotary frequencies against transformers' own, from both generations of config."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aserve.errors import ModelError
from aserve.tensor.rope import inv_freq, rope_parameters, rope_table

SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.25,
    },
)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: s["rope_type"])
@pytest.mark.parametrize("generation", [4, 5])
def test_frequencies_are_those_of_transformers(scaling: dict[str, Any], generation: int) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 2048}
    if generation == 5:
        fields = {"rope_parameters": {**scaling, "rope_theta": 50000.0}}
    else:
        fields = {"rope_theta": 50000.0, "rope_scaling": scaling}
    theirs = transformers.LlamaConfig(**sizes, rope_parameters={**scaling, "rope_theta": 50000.0})
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    ours, our_factor = inv_freq(rope_parameters({**sizes, **fields}), 64)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)
    table = rope_table({**sizes, **fields}, 64, 100)
    angles = torch.arange(100.0)[:, None] * expected
    torch.testing.assert_close(table.cos_sin_PR[:, :32], angles.cos() * factor)
    torch.testing.assert_close(table.cos_sin_PR[:, 32:], angles.sin() * factor)


def test_plain_frequencies_are_powers_of_theta() -> None:
    frequencies, factor = inv_freq(rope_parameters({"rope_theta": 100.0}), 4)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1])
    assert factor == 1.0


def test_old_spelling_and_null_scaling_are_read() -> None:
    config = {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert inv_freq(rope_parameters(config), 4)[0].tolist() == pytest.approx([0.5, 0.05])
    assert rope_parameters({"rope_scaling": None})["rope_type"] == "default"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("linear", "factor"),
        *(("llama3", name) for name in ("factor", "low_freq_factor", "high_freq_factor")),
        *(("yarn", name) for name in ("factor", "original_max_position_embeddings", "beta_fast")),
        *(("yarn", name) for name in ("attention_factor", "mscale")),
    ],
)
@pytest.mark.parametrize("value", [-1, "2", [2], True, float("nan"), float("inf"), 10**400])
def test_a_number_that_is_none_is_refused_by_name(kind: str, name: str, value: object) -> None:
    good = next(scaling for scaling in SCALINGS if scaling["rope_type"] == kind)
    scaling = {**good, name: value}
    with pytest.raises(ModelError, match=f"need positive numbers: {name} is"):
        rope_parameters({"max_position_embeddings": 512, "rope_scaling": scaling})


@pytest.mark.parametrize("fields", [{"rope_theta": 1.0}, {"partial_rotary_factor": "2"}])
def test_rotation_without_meaning_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=next(iter(fields))):
        rope_parameters(fields)


def test_unknown_and_incomplete_kinds_are_refused() -> None:
    with pytest.raises(ModelError, match="'dynamic' is not supported: know default"):
        rope_parameters({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    with pytest.raises(ModelError, match="needs low_freq_factor, high_freq_factor"):
        rope_parameters(
            {"max_position_embeddings": 9, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}
        )
    with pytest.raises(ModelError, match="differ per layer"):
        rope_parameters({"rope_parameters": {"full_attention": {"rope_type": "default"}}})
    with pytest.raises(ModelError, match="even"):
        inv_freq(rope_parameters({"partial_rotary_factor": 0.3}), 10)
    with pytest.raises(ModelError, match="up to head_dim 16"):
        inv_freq(rope_parameters({"partial_rotary_factor": 1.5}), 16)
