"""The default model, whole: against transformers on the same dequantised weights, in float32."""

import functools
import pathlib
import time
from typing import Any

import pytest
import torch
import transformers

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.registry import Model, load_model
from aserve.models.weights.gguf import GgufSource
from aserve.tensor.ops import open_ops
from aserve.text.gguf_file import open_gguf
from aserve.text.tokenizer import load_tokenizer
from tests.models.families import oracle_logits
from tests.models.paged import Paged
from tests.models.ranks import Logits, logits_of, mixed_script

pytestmark = pytest.mark.slow

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
QUESTIONS = ("What is the capital of France?", "Name two colours.")


@pytest.fixture(scope="module")
def model(smollm2_path: pathlib.Path) -> Model:
    return load_model(smollm2_path, ops=open_ops("native", 2), dtype="float32")


@pytest.fixture(scope="module")
def oracle(smollm2_path: pathlib.Path, model: Model) -> Any:
    """transformers' llama with the tensors of the file."""
    source, spec = GgufSource(open_gguf(smollm2_path)), model.spec
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.inner,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.context_len,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(config)
    state = {
        name: source.read(name, tuple(slice(0, size) for size in entry.shape), torch.float32)
        for name, entry in source.entries.items()
    }
    made.load_state_dict(state, strict=False, assign=True)
    made.tie_weights()
    made.model.rotary_emb = type(made.model.rotary_emb)(config)
    assert not any(parameter.is_meta for parameter in made.parameters())
    return made.eval()


def prompt_ids(path: pathlib.Path, question: str) -> list[int]:
    return load_tokenizer(path).encode(CHAT.format(question))


@pytest.mark.parametrize("question", QUESTIONS)
def test_logits_and_greedy_tokens_are_those_of_transformers(
    model: Model, oracle: Any, smollm2_path: pathlib.Path, question: str
) -> None:
    tokens = prompt_ids(smollm2_path, question)
    logits = Paged(model).step((0, tokens))[0]
    wanted = oracle_logits(oracle, tokens)
    assert (logits - wanted).abs().max() < 5e-4
    mine = Paged(model).greedy(tokens, 16)
    answer = oracle.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens)),  # else every <|im_end|> is taken for padding
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=2,
    )
    assert mine == answer[0, len(tokens) :].tolist()


def test_in_bfloat16_it_knows_the_capital_of_france(smollm2_path: pathlib.Path) -> None:
    model = load_model(smollm2_path, ops=open_ops("native", 2))
    assert model.spec.dtype == torch.bfloat16
    tokenizer = load_tokenizer(smollm2_path)
    out = Paged(model).greedy(prompt_ids(smollm2_path, QUESTIONS[0]), 8)
    assert tokenizer.decode(out) == "The capital of France is Paris.<|im_end|>"


def test_weights_are_in_memory_once_and_load_fast(smollm2_path: pathlib.Path) -> None:
    started = time.monotonic()
    model = load_model(smollm2_path, ops=open_ops("native", 2))
    seconds = time.monotonic() - started
    parameters = 134_515_008
    assert model.nbytes < parameters * 2 * 1.02
    assert seconds < 15, "about one on an idle machine"


LAYOUTS = {
    "tp 3": Layout(tp=3),
    "pp 2": Layout(pp=2),
    "pp 3": Layout(pp=3),
    "pp 2 x tp 3": Layout(pp=2, tp=3),
    "dp 3": Layout(tp=3, dp=3),
    "cp 3": Layout(tp=3, cp=3),
    "cp 3, zigzag": Layout(tp=3, cp=3, cp_split="zigzag"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_exact_logits_of_every_layout_are_those_of_one_rank(
    smollm2_path: pathlib.Path, name: str
) -> None:
    layout, script = LAYOUTS[name], mixed_script(more=64)
    ops = open_ops("native", 2)

    def load(rank: int) -> Model:
        return load_model(smollm2_path, ops=ops, layout=layout, rank=rank)

    got, wanted = logits_of(Grid(layout), load, script), _of_one_rank(smollm2_path)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)


@functools.cache
def _of_one_rank(path: pathlib.Path) -> Logits:
    model = load_model(path, ops=open_ops("native", 2))
    return logits_of(Grid(Layout()), lambda rank: model, mixed_script(more=64))
