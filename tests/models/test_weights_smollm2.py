"""The default model in the blocks of its file: beside transformers with the same numbers, beside
its own bfloat16, and what it takes of memory."""

import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

from aserve import _native
from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.models.registry import Model, load_model
from aserve.models.weights.gguf import GgufSource
from aserve.tensor.ops import open_ops
from aserve.text.gguf_file import open_gguf
from aserve.text.tokenizer import load_tokenizer
from tests.models.families import oracle_logits
from tests.models.paged import Paged
from tests.models.ranks import logits_of, mixed_script
from tests.models.test_layouts import assert_same
from tests.models.test_smollm2 import prompt_ids

pytestmark = pytest.mark.slow

QUESTIONS = ("What is the capital of France?", "Name two colours.", "Write one line about rain.")
N_TOKENS = 12
# How far bfloat16 activations and KV move a logit of this model; measured 0.45 at most.
LOGIT_TOLERANCE = 0.75
TILES = _native.level() == "amx"
MARGIN = 2 * LOGIT_TOLERANCE  # of a first choice that such a move cannot turn


@pytest.fixture(scope="module")
def model(smollm2_path: pathlib.Path) -> Model:
    return load_model(smollm2_path, ops=open_ops("native", 2))


@pytest.fixture(scope="module")
def oracle(smollm2_path: pathlib.Path) -> Any:
    """transformers' llama, float32, with the file's numbers; on tiles of AMX, their bfloat16."""
    source = GgufSource(open_gguf(smollm2_path))
    config = transformers.LlamaConfig(
        **{name: value for name, value in source.config.items() if value is not None}
    )
    made = transformers.LlamaForCausalLM(config)
    weights = {
        name: source.read(name, tuple(slice(0, n) for n in entry.shape), torch.float32)
        for name, entry in source.entries.items()
    }
    if TILES:
        weights = {
            name: one.bfloat16().float() if one.dim() > 1 else one for name, one in weights.items()
        }
    made.load_state_dict(weights, strict=False)
    made.tie_weights()
    return made.eval()


def test_every_matrix_stays_as_it_is(model: Model, smollm2_path: pathlib.Path) -> None:
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        packed = (attention.qkv, attention.out.weight, mlp.gate_up, mlp.down.weight)  # type: ignore[attr-defined]
        assert {one.format for one in packed} == {"q4m"}
    assert model.head.format == "q8"
    assert model.nbytes < smollm2_path.stat().st_size


@pytest.mark.parametrize("question", QUESTIONS)
def test_text_is_that_of_transformers_where_the_choice_is_clear(
    question: str, model: Model, oracle: Any, smollm2_path: pathlib.Path
) -> None:
    """Greedily along transformers' own text, so that one close call does not end the comparison."""
    tokens = prompt_ids(smollm2_path, question)
    with torch.inference_mode():
        answer = oracle.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens)),
            max_new_tokens=N_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=2,
        )
    text = answer[0].tolist()
    exact, logits = oracle_logits(oracle, text), Paged(model).step((0, text))[0]
    assert (logits - exact).abs().max() < LOGIT_TOLERANCE
    best = exact.topk(2).values
    clear = (best[:, 0] - best[:, 1]) > MARGIN
    assert clear[len(tokens) :].sum() >= 2
    assert torch.equal(logits.argmax(-1)[clear], exact.argmax(-1)[clear])
    assert torch.nn.functional.cosine_similarity(logits, exact).min() > 0.999


def test_blocks_give_the_logits_of_bfloat16_in_less_memory(
    model: Model, oracle: Any, smollm2_path: pathlib.Path
) -> None:
    """On tiles of AMX their bits; elsewhere the numbers are exact where bfloat16 rounds d * q + m,
    and so at least as near to the file."""
    tokens = load_tokenizer(smollm2_path).encode("Water boils at a hundred degrees, so the tea was")
    exact = oracle_logits(oracle, tokens)
    expanded = load_model(smollm2_path, ops=open_ops("native", 2), weights="bf16")
    kept, wide = (Paged(one).step((0, tokens))[0] for one in (model, expanded))
    if TILES:
        assert torch.equal(kept, wide)
    off = [(one - exact).square().mean().sqrt() for one in (kept, wide)]
    assert off[0] < 1.05 * off[1]
    assert off[1] < 0.2
    assert expanded.nbytes > 2.5 * model.nbytes


def test_three_ranks_have_the_bits_of_one(smollm2_path: pathlib.Path) -> None:
    ops, script = open_ops("native", 1), mixed_script()

    def run(layout: Layout) -> Any:
        def load(rank: int) -> Model:
            return load_model(smollm2_path, ops=ops, layout=layout, rank=rank)

        return logits_of(Grid(layout), load, script)

    assert_same(run(Layout(tp=3)), run(Layout()))


MEMORY = """
import sys
from aserve.models.registry import load_model
from aserve.tensor.ops import open_ops

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

ops = open_ops("native", 2)
before = resident("VmRSS")
model = load_model(sys.argv[1], ops=ops)
print(model.nbytes, resident("VmRSS") - before, resident("VmHWM") - before)
"""


def test_a_load_takes_little_more_than_what_is_held(smollm2_path: pathlib.Path) -> None:
    """The file's pages do not stay, and nothing is expanded on the way."""
    command = [sys.executable, "-c", MEMORY, str(smollm2_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    held, resident, peak = map(int, done.stdout.split())
    assert resident < 1.25 * held + (16 << 20)
    assert peak < 2 * held + (32 << 20)
