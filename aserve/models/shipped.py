"""Which draft head goes with a target: the one that is asked for, or one that comes with aserve."""

import pathlib
from typing import NamedTuple

from aserve.errors import ModelError
from aserve.models.eagle_loading import load_head_spec
from aserve.models.eagle_spec import HeadSpec, Method
from aserve.models.spec import ModelSpec

FOLDER = pathlib.Path(__file__).parents[1] / "heads"


class Sizes(NamedTuple):
    """What tells a target from others. A head that fits is no danger to another one of these sizes:
    what it proposes is checked all the same."""

    arch: str
    hidden: int
    layers: int
    vocab: int


SHIPPED: dict[tuple[Method, Sizes], str] = {
    ("eagle3", Sizes("LlamaForCausalLM", 576, 30, 49152)): "smollm2-eagle3",
}


def head_folder(method: Method, path: str | None, target: ModelSpec) -> pathlib.Path:
    """Raises ModelError where none was asked for and none comes with aserve."""
    if path is not None:
        return pathlib.Path(path).expanduser()
    sizes = Sizes(target.arch, target.hidden, target.layers, target.vocab)
    name = SHIPPED.get((method, sizes))
    if name is not None and (FOLDER / name / "config.json").is_file():
        return FOLDER / name
    raise ModelError(
        f"no {method} head for this model comes with aserve: train one with `aserve train-draft "
        f"MODEL --method {method} --out DIR` and give its folder as spec.path"
    )


def find_head(method: Method, path: str | None, target: ModelSpec) -> tuple[pathlib.Path, HeadSpec]:
    """Where the head is, and what. Raises ModelError, also where it is one of another method."""
    folder = head_folder(method, path, target)
    spec = load_head_spec(folder, target)
    if spec.method != method:
        raise ModelError(
            f"spec.method is {method}, the head in {folder} is one of {spec.method}: say "
            f"--spec.method {spec.method}, or give another spec.path"
        )
    return folder, spec
