"""`aserve train-draft` from a tiny model to a head that loads, and all that it refuses."""

import json
import pathlib
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

from aserve.cli import main
from aserve.models.eagle_loading import load_head, shared_with
from aserve.models.registry import load_model
from aserve.tensor.ops import open_ops
from aserve.testing.tiny import write_tiny_model
from aserve.training.acceptance import SHAPES
from aserve.training.files import ANSWER, load_conversations
from aserve.training.making import measure_head

pytestmark = pytest.mark.slow

SMALL = (
    *("--cache.kv_mib_max", "16", "--compute.threads", "1", "--tokens", "300", "--streams", "16"),
    *("--rounds", "0.2", "--held-out", "2", "--answer-len", "8", "--draft-vocab", "64"),
)


def train(model: pathlib.Path, out: pathlib.Path, *given: str) -> int:
    return main(["train-draft", str(model), "--out", str(out), *SMALL, *given])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, pathlib.Path]:
    """(a tiny model, the folder of its EAGLE-3 head)."""
    folder = tmp_path_factory.mktemp("draft")
    model = write_tiny_model(folder / "tiny", seed=4)
    assert train(model, folder / "head", "--method", "eagle3") == 0
    return model, folder / "head"


def tensors(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_the_head_has_the_public_layout_and_loads(
    trained: tuple[pathlib.Path, pathlib.Path],
) -> None:
    model, folder = trained
    found = tensors(folder)
    assert found["fc.weight"].shape == (64, 3 * 64)
    assert found["midlayer.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert found["d2t"].dtype == torch.int64
    assert int(found["t2d"].sum()) == len(found["d2t"]) == 64
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["draft_vocab_size"], config["vocab_size"]) == (64, 384)
    ops = open_ops("native", 1)
    head = load_head(folder, shared_with(load_model(model, ops=ops)), ops)
    ids = torch.arange(64) + found["d2t"]
    assert torch.equal(head.token_ids(torch.arange(64)), ids)
    assert 2 in ids  # the end of a turn can be drafted


def test_the_card_says_what_it_is(trained: tuple[pathlib.Path, pathlib.Path]) -> None:
    text = (trained[1] / "README.md").read_text()
    for part in ("EAGLE-3", "--tokens 300", "conversations", "steps", "chain of 3", "tree of 32"):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith(("| questions", "| self"))]
    assert all(float(cell) >= 1 for row in rows for cell in row.split("|")[2:-1])


def test_the_same_command_again_has_nothing_left_to_do(
    trained: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    model, folder = trained
    copy = pathlib.Path(shutil.copytree(folder, tmp_path / "head"))
    shutil.rmtree(copy / "work" / "features-eagle3")
    for name in ("model.safetensors", "config.json", "README.md"):
        (copy / name).unlink()
    assert train(model, copy, "--method", "eagle3") == 0
    before, after = tensors(folder), tensors(copy)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (copy / "README.md").read_text() == (folder / "README.md").read_text()


def test_an_eagle_head_from_the_conversations_of_another(
    trained: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    model, folder = trained
    for name in ("tokens", "held_out"):
        shutil.copytree(folder / "work" / name, tmp_path / "head" / "work" / name)
    assert train(model, tmp_path / "head", "--method", "eagle") == 0
    found = tensors(tmp_path / "head")
    assert found["fc.weight"].shape == (64, 2 * 64)
    assert "layers.0.input_layernorm.weight" not in found
    ops = open_ops("native", 1)
    head = load_head(tmp_path / "head", shared_with(load_model(model, ops=ops)), ops)
    assert head.spec.method == "eagle"


def test_a_head_begins_as_the_last_layer_of_its_model(
    trained: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    model, folder = trained
    for name in ("tokens", "held_out"):
        shutil.copytree(folder / "work" / name, tmp_path / "head" / "work" / name)
    flags = ("--method", "eagle3", "--rate", "1e-9")
    assert train(model, tmp_path / "head", *flags) == 0
    ours, theirs = tensors(tmp_path / "head"), tensors(model)
    layer = "model.layers.1."
    for name in ("self_attn.o_proj", "mlp.gate_proj", "post_attention_layernorm"):
        name = f"{name}.weight"
        torch.testing.assert_close(ours[f"midlayer.{name}"], theirs[layer + name])
    for name in ("q", "k", "v"):
        name = f"self_attn.{name}_proj.weight"
        torch.testing.assert_close(ours[f"midlayer.{name}"][:, 64:], theirs[layer + name])
    norm = theirs[layer + "input_layernorm.weight"]
    torch.testing.assert_close(ours["midlayer.hidden_norm.weight"], norm)
    (tmp_path / "head" / "work" / "checkpoint.safetensors").unlink()
    assert train(model, tmp_path / "head", *flags, "--start", "plain") == 0
    plain = tensors(tmp_path / "head")
    assert plain["midlayer.mlp.gate_proj.weight"].shape == (128, 64)
    assert not torch.equal(
        plain["midlayer.mlp.gate_proj.weight"], ours["midlayer.mlp.gate_proj.weight"]
    )


def test_a_head_is_measured_by_itself(trained: tuple[pathlib.Path, pathlib.Path]) -> None:
    model, folder = trained
    loaded = load_model(model, ops=open_ops("native", 1, fused=False))
    conversations = load_conversations(folder / "work" / "held_out" / "00000.safetensors")
    found = measure_head(folder, loaded, conversations)
    assert set(found) == set(SHAPES)
    answered = sum(max(0, int((one.writers == ANSWER).sum()) - 1) for one in conversations)
    assert {one.tokens for one in found.values()} == {answered}


def test_conversations_of_a_file(
    trained: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"The dog {n}?"} for n in range(6)]
    turns = [{"role": "user", "content": "Fox?"}, {"role": "assistant", "content": "No."}]
    lines.append({"messages": turns})
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(trained[0], tmp_path / "head", "--method", "eagle3", "--data", str(data)) == 0
    text = (tmp_path / "head" / "README.md").read_text()
    assert "6 conversations" in text
    assert "1 more were held out" in text
    assert "lines of the file" in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--method", "medusa"), "--method is 'medusa': use one of eagle, eagle3"),
        (("--method", "eagle3", "--tokens", "0"), "--tokens is 0: at least 1"),
        (("--method", "eagle3", "--rate", "-1"), "--rate is -1.0"),
        (("--method", "eagle3", "--start", "cold"), "--start is 'cold'"),
        (("--method", "eagle3", "--data", "none.jsonl"), "none.jsonl cannot be read"),
        (("--method", "eagle3", "--seed", "9"), "conversations of another training"),
        (("--method", "eagle3", "--rate", "0.5"), "of another training (rate 0.001, now 0.5)"),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: tuple[str, ...],
    said: str,
    trained: tuple[pathlib.Path, pathlib.Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(trained[0], trained[1], *given) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "head"
    assert train(tmp_path / "no-model", out, "--method", "eagle3") == 2
    assert f"--out {out} cannot be written: Not a directory" in capsys.readouterr().err


def test_a_model_without_a_chat_template_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    assert train(model, tmp_path / "head", "--method", "eagle3") == 2
    assert "has no chat template" in capsys.readouterr().err
