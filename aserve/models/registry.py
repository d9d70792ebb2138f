"""The architectures by name, and the two ways in: `load_spec` and `load_model`."""

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args

import torch

from aserve.core.config import Layout
from aserve.core.layout import Grid
from aserve.errors import ConfigError, ModelError
from aserve.models import dense, mixture
from aserve.models.decoder import MlpOf, Model
from aserve.models.divide import check_layout
from aserve.models.fetch import Progress
from aserve.models.fused import fuse
from aserve.models.memory import give_back
from aserve.models.spec import Fields, ModelSpec, decoder_spec, read_json, token_ids
from aserve.models.weights.forms import Conversion
from aserve.models.weights.gguf import GgufSource
from aserve.models.weights.loader import ONE_RANK, Checklist, Reader
from aserve.models.weights.safetensors import open_safetensors
from aserve.models.weights.source import Source, auto_dtype
from aserve.tensor.ops import Ops
from aserve.text.gguf_file import open_gguf

__all__ = [
    "ARCHITECTURES",
    "Model",
    "check_layout",
    "load_model",
    "load_spec",
    "open_checkpoint",
    "spec_of",
]

CONVERSIONS = get_args(Conversion)
DTYPES = {"auto": None, "bf16": torch.bfloat16, "float32": torch.float32}
THREADS_MAX = 4  # that dequantise while one packs


class Types(TypedDict, total=False):
    """`dtype` is that of KV, and of weights that are not in blocks. "auto", the default, keeps
    float32 checkpoints as they are and makes bfloat16 of all others.

    `weights` is what becomes of matrices: "keep", the default, leaves Q8_0, Q4_0, Q4_1 and Q4_K in
    blocks, the last as Q4_1, but not where `dtype` is "float32"; "bf16" makes bfloat16 of all;
    "int8" and "q4" make blocks of those that are larger.
    """

    dtype: Literal["auto", "bf16", "float32"]
    weights: Conversion


class Family(NamedTuple):
    """`fields_of` gives what a config of this family adds to the spec, `mlp_of` a layer's MLP."""

    fields_of: Callable[[Fields], dict[str, Any]]
    mlp_of: MlpOf


ARCHITECTURES = {
    "LlamaForCausalLM": Family(dense.llama, dense.mlp_of),
    "MistralForCausalLM": Family(dense.mistral, dense.mlp_of),
    "Qwen2ForCausalLM": Family(dense.qwen2, dense.mlp_of),
    "Qwen3ForCausalLM": Family(dense.qwen3, dense.mlp_of),
    "Qwen3MoeForCausalLM": Family(mixture.qwen3_moe, mixture.qwen3_mlp),
    "MixtralForCausalLM": Family(mixture.mixtral, mixture.mixtral_mlp),
}


def load_spec(path: str | os.PathLike[str]) -> ModelSpec:
    """What a folder (config.json, safetensors) or a .gguf file holds. Raises ModelError."""
    with open_checkpoint(pathlib.Path(path)) as (config, source):
        return spec_of(config, source, auto_dtype(source))


def load_model(
    path: str | os.PathLike[str],
    *,
    ops: Ops,
    progress: Progress | None = None,
    layout: Layout = ONE_RANK,
    rank: int = 0,
    **types: Unpack[Types],
) -> Model:
    """Read and pack the weights of `path`. `progress` gets (bytes done, bytes in all, what).

    `rank` of `layout` gets its share. Raises ModelError with every missing, surplus and misshapen
    tensor, ConfigError where the model cannot be split so, or for an unknown type.
    """
    dtype, weights = types_of(types)
    grid = Grid(layout)
    with open_checkpoint(pathlib.Path(path)) as (config, source):
        spec = spec_of(config, source, dtype or auto_dtype(source))
        if findings := check_layout(spec, layout):
            raise ConfigError(findings)
        mlp_of = ARCHITECTURES[spec.arch].mlp_of
        whole, part = Checklist(), Checklist(layout, rank)
        Model(spec, whole, ops, mlp_of, Grid(ONE_RANK), 0)
        whole.check(source)
        Model(spec, part, ops, mlp_of, grid, rank)
        reader = Reader(source, ops, numbers_of(spec, weights), layout, rank, weights)
        threads = min(THREADS_MAX, len(os.sched_getaffinity(0)))
        with reader.reading_ahead(part, threads, progress):
            model = Model(spec, reader, ops, mlp_of, grid, rank)
        model.nbytes = reader.nbytes
        fuse(model)
    give_back()
    return model


def numbers_of(spec: ModelSpec, weights: Conversion | None) -> torch.dtype:
    """Of matrices that are not in blocks."""
    return torch.bfloat16 if weights == "bf16" else spec.dtype


def types_of(types: Types) -> tuple[torch.dtype | None, Conversion | None]:
    """(dtype, None for the checkpoint's own; what becomes of matrices, None for no blocks)."""
    weights, dtype = types.get("weights", "keep"), types.get("dtype", "auto")
    for name, value, known in (("weights", weights, CONVERSIONS), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}: use one of {', '.join(known)}")
    if weights == "bf16" and dtype == "auto":
        return torch.bfloat16, weights
    return DTYPES[dtype], None if (weights, dtype) == ("keep", "float32") else weights


@contextlib.contextmanager
def open_checkpoint(path: pathlib.Path) -> Iterator[tuple[dict[str, Any], Source]]:
    """(fields of a config.json, tensors) of a checkpoint in either format."""
    if path.is_file():
        source = GgufSource(open_gguf(path))
        yield source.config, source
        return
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is no model folder")
    config = read_json(path / "config.json")
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
        ends = token_ids(generation.get("eos_token_id")) + token_ids(config.get("eos_token_id"))
        config = {**config, "eos_token_id": list(dict.fromkeys(ends))}
    with open_safetensors(path) as tensors:
        yield config, tensors


def spec_of(config: dict[str, Any], source: Source, dtype: torch.dtype) -> ModelSpec:
    named = config.get("architectures")
    named = named if isinstance(named, list) else []
    arch = next((name for name in named if name in ARCHITECTURES), None)
    if arch is None:
        given = ", ".join(map(str, named)) or config.get("model_type") or "none"
        raise ModelError(
            f"{source.origin} holds architecture {given}, which is not supported: know "
            f"{', '.join(ARCHITECTURES)}"
        )
    fields = Fields(config)
    return decoder_spec(arch, fields, dtype, ARCHITECTURES[arch].fields_of(fields))
