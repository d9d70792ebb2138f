"""A tiny random llama in Hugging Face layout, with its own byte-level tokenizer and chat template.

It says nothing sensible, but it is a real checkpoint: grouped-query attention, special tokens, tool
syntax. Built from a seed alone, without transformers and without the network.
"""

import json
import pathlib

import safetensors.torch
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\n</tools>\\n\\nAnswer a call as <tool_call>\\n{"name": <name>, "arguments": <object>}' }}
    {{- '\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'system' and not loop.first or message['role'] == 'user' %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message['content'] %}{{ message['content'] }}{% endif %}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\\n<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message['role'] == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Once upon a time there was a small engine that answered every question it was asked.",
    "When in doubt, measure; when not in doubt, measure twice and then write down the number.",
    "She said that they would have been there, had the weather on the hill been any better.",
    '{"name": "weather", "arguments": {"city": "Paris", "days": 3}} is how a call is written.',
)


def write_tiny_model(
    path: pathlib.Path,
    *,
    seed: int = 0,
    vocab: int = 384,
    context_len: int = 512,
    dtype: torch.dtype = torch.bfloat16,
) -> pathlib.Path:
    """Write config, weights, tokenizer and chat template under `path`, and return `path`."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(vocab)
    tokenizer.save(str(path / "tokenizer.json"))
    config = _config(tokenizer.get_vocab_size(), context_len, dtype)
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2]})
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context_len,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    weights = _weights(config, torch.Generator().manual_seed(seed), dtype)
    safetensors.torch.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tiny_tokenizer(vocab: int = 384) -> tokenizers.Tokenizer:
    """Byte-level BPE of `vocab` tokens, the specials first; any text goes there and back."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP_TOKENS),
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(text, special=False) for text in MARKUP_TOKENS])
    return tokenizer


def _config(vocab: int, context_len: int, dtype: torch.dtype) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": context_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _weights(
    config: dict[str, object], generator: torch.Generator, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Large enough that logits spread by a few units and depend on the whole context."""
    hidden, inner, vocab = 64, 128, int(str(config["vocab_size"]))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(2):
        head = f"model.layers.{layer}."
        shapes |= {
            head + "self_attn.q_proj.weight": (64, hidden),
            head + "self_attn.k_proj.weight": (32, hidden),
            head + "self_attn.v_proj.weight": (32, hidden),
            head + "self_attn.o_proj.weight": (hidden, 64),
            head + "mlp.gate_proj.weight": (inner, hidden),
            head + "mlp.up_proj.weight": (inner, hidden),
            head + "mlp.down_proj.weight": (hidden, inner),
            head + "input_layernorm.weight": (hidden,),
            head + "post_attention_layernorm.weight": (hidden,),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        spread = {"lm_head.weight": 0.3, "model.embed_tokens.weight": 1.0}.get(name, 0.2)
        tensor = 1 + 0.1 * noise if len(shape) == 1 else spread * noise
        weights[name] = tensor.to(dtype)
    return weights


def _write_json(path: pathlib.Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n", encoding="utf-8")
