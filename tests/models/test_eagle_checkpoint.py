"""What a draft head may be wrong in: each refusal names what it is and both values."""

import pathlib
from typing import Any

import pytest
import torch

from aserve.errors import ModelError
from aserve.models.eagle_loading import load_head, shared_with
from aserve.models.eagle_spec import Shared, default_captured
from aserve.models.registry import load_model
from aserve.tensor.reference import ReferenceOps
from tests.models import heads
from tests.models.families import saved

OPS = ReferenceOps()


@pytest.fixture(scope="module")
def shared() -> Shared:
    return shared_with(load_model(saved("llama")[0], ops=OPS))


def refused(folder: pathlib.Path, shared: Shared) -> str:
    with pytest.raises(ModelError) as caught:
        load_head(folder, shared, OPS)
    return "\n".join(caught.value.findings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 999}, "vocabulary of 999 tokens, the target has 160"),
        ({"target_hidden_size": 4096}, "hidden size 4096, this one has 64"),
        ({"hidden_size": 128}, "its hidden size is 128, the target's is 64"),
        ({"num_attention_heads": 8}, "k_proj.weight is [32, 128], should be [16, 128]"),
        ({"head_dim": 32}, "k_proj.weight is [32, 128], should be [64, 128]"),
        ({"draft_vocab_size": 50}, "lm_head.weight is [48, 64], should be [50, 64]"),
        ({"draft_vocab_size": 500}, "drafts of 500 tokens out of 160"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 30]}},
            "what enters layers [30], the target has 3",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
            "its fc takes 192 columns, the target gives 128",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "'all': a list of layers"),
        ({"num_hidden_layers": 2}, "it has 2 layers"),
        ({"norm_output": True}, "not supported"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
    ],
)
def test_a_config_that_does_not_fit_names_both_values(
    changes: dict[str, Any], said: str, shared: Shared, tmp_path: pathlib.Path
) -> None:
    config, weights = heads.eagle3()
    assert said in refused(heads.write(tmp_path, config | changes, weights), shared)


def test_an_eagle_head_of_another_hidden_size_is_refused(
    shared: Shared, tmp_path: pathlib.Path
) -> None:
    config, weights = heads.eagle()
    said = refused(heads.write(tmp_path, config | {"hidden_size": 32}, weights), shared)
    assert "its hidden size is 32, the target's is 64" in said


def test_missing_and_surplus_tensors_are_named_as_the_file_names_them(
    shared: Shared, tmp_path: pathlib.Path
) -> None:
    config, weights = heads.eagle3()
    del weights["midlayer.mlp.up_proj.weight"]
    weights["fc_norm.weight"] = torch.ones(64)
    said = refused(heads.write(tmp_path, config, weights), shared)
    assert "1 missing:\n  midlayer.mlp.up_proj.weight" in said
    assert "1 surplus:\n  fc_norm.weight" in said


@pytest.mark.parametrize(
    ("offset", "said"), [(500, "d2t leads to tokens"), (-1, "d2t leads to a token twice")]
)
def test_a_map_out_of_the_vocabulary_is_refused(
    offset: int, said: str, shared: Shared, tmp_path: pathlib.Path
) -> None:
    config, weights = heads.eagle3()
    ids = weights["d2t"] + torch.arange(heads.DRAFT_VOCAB)
    ids[7] = ids[7] + offset if offset > 0 else ids[6]
    weights["d2t"] = ids - torch.arange(heads.DRAFT_VOCAB)
    assert said in refused(heads.write(tmp_path, config, weights), shared)


def test_pickle_is_never_loaded(shared: Shared, tmp_path: pathlib.Path) -> None:
    folder = heads.write(tmp_path, *heads.eagle())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin is pickle, which is never loaded" in refused(folder, shared)


def test_what_is_no_head_is_refused(shared: Shared, tmp_path: pathlib.Path) -> None:
    assert "is no EAGLE head" in refused(saved("llama")[0], shared)
    assert "has no config.json" in refused(tmp_path, shared)


def test_features_come_from_three_layers_that_the_target_has() -> None:
    assert default_captured(30) == (2, 15, 27)
    assert all(0 <= one < n for n in range(1, 9) for one in default_captured(n))
