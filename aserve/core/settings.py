"""Configuration from defaults, a TOML table and dotted overrides, in that order of weakness.

Everything wrong with it is found at once. Which features go together is `features`' matter.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from aserve.core.config import Config, Spec
from aserve.errors import ConfigError

SECONDS_MAX = 86400.0

# Every key: least and greatest value (numbers only), and a line of help.
KEYS: dict[str, tuple[float | None, float | None, str]] = {
    "model.path": (None, None, "smollm2, a folder, a .gguf file or a hub name"),
    "model.name": (None, None, "what clients call the model; default: from the path"),
    "model.dtype": (None, None, "of weights that are not in blocks, and of KV"),
    "model.weights": (None, None, "of matrices: the file's blocks, or made so when loading"),
    "model.context_len": (1, 1 << 24, "tokens of prompt and output; default: the model's own"),
    "model.chat_template": (None, None, "a file with a Jinja template instead of the model's"),
    "model.tool_parser": (None, None, "how tool calls stand in the text"),
    "model.reasoning_parser": (None, None, "how reasoning stands in the text"),
    "layout.tp": (1, 1 << 16, "tensor-parallel ranks of a stage"),
    "layout.pp": (1, 1 << 16, "pipeline stages"),
    "layout.dp": (1, 1 << 16, "attention groups inside tp"),
    "layout.cp": (1, 1 << 16, "ranks that share a prompt's rows, inside tp"),
    "layout.ep": (1, 1 << 16, "ranks that share the experts, inside tp"),
    "layout.moe_dp": (1, 1 << 16, "copies of the experts, inside tp"),
    "layout.layers": (1, 1 << 16, "layers of each stage, such as 10,12,8; default: even shares"),
    "layout.cp_split": (None, None, "which of a prompt's rows go to which of the cp ranks"),
    "layout.experts": (None, None, "rows go to experts by all-to-all, or all are gathered"),
    "layout.numerics": (None, None, "exact: the bits of one rank; fast: sums may be reordered"),
    "ranks.live": (None, None, "auto: threads for up to 4 ranks, else processes"),
    "ranks.layer_plane": (None, None, "what carries sums between processes of one host"),
    "ranks.plane_s": (0.01, 3600.0, "a rank that keeps its peers waiting longer is absent"),
    "ranks.start_s": (0.1, SECONDS_MAX, "time for all ranks to load and join"),
    "ranks.restarts_max": (0, 1000, "restarts of the ranks without a token in between"),
    "schedule.step_tokens": (1, 1 << 20, "rows computed in one step, at least a page"),
    "schedule.running_max": (1, 1 << 16, "sequences that hold KV at once"),
    "schedule.waiting_max": (1, 1 << 20, "queued sequences; beyond it requests get 429"),
    "schedule.prefix_cache": (None, None, "keep and share the KV of common prefixes"),
    "schedule.overlap": (0, 64, "plans in flight beyond one a stage; default: 1 if one stage"),
    "schedule.dynamic_chunks": (None, None, "size prompt chunks for equal time (pp > 1)"),
    "cache.page_size": (1, 1024, "tokens of one KV page"),
    "cache.kv_tokens": (1, 1 << 31, "size of the KV pool; default: a share of free memory"),
    "cache.kv_mib_max": (1, 1 << 24, "bound on the default size of the KV pool, in MiB"),
    "cache.kept_tokens": (0, 1 << 31, "tokens of KV beyond which unused prefixes are given up"),
    "cache.kv_dtype": (None, None, "of the KV cache: auto is the model's, int8 halves bf16"),
    "spec.method": (None, None, "who drafts tokens that the model then verifies together"),
    "spec.path": (None, None, "draft head or draft model; default: what ships for the model"),
    "spec.depth": (1, 32, "levels of a draft; default: the method's"),
    "spec.topk": (1, 32, "children of a drafted token, 1 is a chain; default: the method's"),
    "spec.tokens": (1, 63, "tokens drafted at once; default: the method's"),
    "spec.adaptive": (None, None, "draft less where that is measured to be faster"),
    "spec.accept": (None, None, "noise: drafts know that of the draws; rejection: they do not"),
    "spec.ngram_min": (1, 64, "tokens that must repeat before n-gram drafts"),
    "spec.ngram_max": (1, 64, "tokens that n-gram looks for first"),
    "compute.threads": (1, 4096, "default: every core this process may use"),
    "compute.kernels": (None, None, "native (csrc) or reference (plain torch)"),
    "compute.fused": (None, None, "native kernels run whole blocks of layers in one call"),
    "limits.n_max": (1, 1 << 16, "choices of one request"),
    "limits.logprobs_max": (0, 1 << 10, "alternatives beside each token"),
    "limits.stop_max": (0, 1 << 10, "stop strings of one request"),
    "limits.stop_len_max": (1, 1 << 16, "characters of a stop string"),
    "limits.bad_words_max": (0, 1 << 16, "bad words of one request"),
    "limits.logit_bias_max": (0, 1 << 20, "biased tokens of one request"),
    "limits.prompts_max": (1, 1 << 16, "prompts of one completions call"),
    "limits.messages_max": (1, 1 << 20, "messages of one chat"),
    "limits.grammar_bytes_max": (1, 1 << 30, "size of a schema, regex or grammar"),
    "limits.grammar_depth_max": (1, 1 << 10, "nesting of a schema"),
    "limits.grammar_compile_s": (0.001, SECONDS_MAX, "time to compile a constraint"),
    "limits.body_bytes_max": (1, 1 << 32, "size of an HTTP body"),
    "server.host": (None, None, "address to listen on"),
    "server.port": (0, 65535, "port to listen on; 0 takes a free one"),
    "server.api_key": (None, None, "clients must send it as a bearer token"),
    "server.drain_s": (0.0, SECONDS_MAX, "time for running requests after SIGTERM"),
    "server.read_s": (0.001, SECONDS_MAX, "a request's body must have come within this"),
    "server.keep_alive_s": (0.0, SECONDS_MAX, "an idle connection is kept this long"),
    "server.connections_max": (1, 1 << 20, "open connections; beyond it clients get 503"),
    "server.write_s": (0.001, SECONDS_MAX, "a client that reads nothing this long is cut off"),
    "server.request_s": (0.001, SECONDS_MAX, "longest life of a request"),
    "server.log_level": (None, None, "least severe lines to log"),
    "server.log_json": (None, None, "log lines as JSON"),
}


class Setting(msgspec.Struct, frozen=True):
    """One dotted key, for flags and documentation."""

    key: str
    type: str
    default: Any
    choices: tuple[str, ...]
    help: str


def describe() -> tuple[Setting, ...]:
    """Every dotted key with its type, default and meaning."""
    default = Config()
    settings: list[Setting] = []
    for key, hint in _types().items():
        section, name = key.split(".")
        value = getattr(getattr(default, section), name)
        choices = tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()
        settings.append(Setting(key, _type_text(hint), value, choices, KEYS[key][2]))
    return tuple(settings)


def merge(
    defaults: Config, toml: Mapping[str, Any], overrides: Mapping[str, str] | None = None
) -> Config:
    """`defaults` under a TOML table under overrides such as {"layout.tp": "2"}.

    Raises ConfigError with every finding: unknown keys, wrong types, values out of range.
    """
    types = _types()
    found: list[str] = []
    values: dict[str, Any] = {}
    for key, value in _flatten(toml, found):
        if _known(key, types, found):
            _convert(key, value, types[key], values, found)
    for key, text in (overrides or {}).items():
        if _known(key, types, found):
            _parse(key, text, types[key], values, found)
    config = _replace(defaults, values)
    found += _range_findings(config)
    if found:
        raise ConfigError(found)
    return config


def _types() -> dict[str, Any]:
    """Dotted key to type, in the order of the configuration."""
    return {
        f"{section}.{name}": hint
        for section, struct in get_type_hints(Config).items()
        for name, hint in get_type_hints(struct).items()
    }


def _type_text(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if hint is type(None):
        return "none"
    if get_origin(hint) is tuple:
        return "list of int"
    if get_args(hint):
        return " | ".join(_type_text(part) for part in get_args(hint))
    return str(hint.__name__)


WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def _wanted(hint: Any) -> str:
    """`_type_text` in words."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return "integers, such as 10,12,8"
    if get_args(hint):
        return " or ".join(_wanted(part) for part in get_args(hint))
    return WORDS.get(hint, "none")


def _flatten(toml: Mapping[str, Any], found: list[str]) -> list[tuple[str, Any]]:
    sections = get_type_hints(Config)
    pairs: list[tuple[str, Any]] = []
    for section, table in toml.items():
        if section not in sections:
            near = get_close_matches(section, sections, n=1)
            hint = f"; did you mean [{near[0]}]?" if near else f"; there are {', '.join(sections)}"
            found.append(f"unknown section [{section}]{hint}")
        elif not isinstance(table, Mapping):
            found.append(f"[{section}] must be a table, not {table!r}")
        else:
            pairs += [(f"{section}.{name}", value) for name, value in table.items()]
    return pairs


def _known(key: str, types: Mapping[str, Any], found: list[str]) -> bool:
    if key in types:
        return True
    near = get_close_matches(key, types, n=1)
    if not near:  # perhaps the right name in the wrong section
        last = key.rsplit(".", 1)[-1]
        near = [known for known in types if known.split(".")[1] == last]
    found.append(f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else ""))
    return False


def _convert(key: str, value: Any, hint: Any, values: dict[str, Any], found: list[str]) -> None:
    try:
        values[key] = msgspec.convert(value, hint)
    except msgspec.ValidationError:
        found.append(f"{key} must be {_wanted(hint)}, not {value!r}")


def _parse(key: str, text: str, hint: Any, values: dict[str, Any], found: list[str]) -> None:
    """An override is text: "none" (or nothing) stands for None where None is allowed."""
    optional = type(None) in get_args(hint)
    if optional and text.lower() in ("", "none"):
        values[key] = None
        return
    if optional:
        hint = Union[tuple(part for part in get_args(hint) if part is not type(None))]  # noqa: UP007
    lenient = hint in (int, float, bool)
    value: Any = text.strip().lower() if lenient else text
    if get_origin(hint) is tuple:
        value = [part.strip() for part in text.split(",")]
    try:
        values[key] = msgspec.convert(value, hint, strict=False)
    except msgspec.ValidationError:
        found.append(f"{key} must be {_wanted(hint)}, not {text!r}")


def _replace(defaults: Config, values: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return msgspec.structs.replace(
        defaults,
        **{
            section: msgspec.structs.replace(getattr(defaults, section), **changes)
            for section, changes in sections.items()
        },
    )


def _range_findings(config: Config) -> list[str]:
    found: list[str] = []
    for key, (least, most, _) in KEYS.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if least is None or most is None or value is None:
            continue
        for one in value if isinstance(value, tuple) else (value,):
            if not least <= one <= most:  # also refuses NaN
                found.append(f"{key} is {one}, it must be from {least} to {most}")
    page_size, kv_tokens = config.cache.page_size, config.cache.kv_tokens
    step_tokens, dp = config.schedule.step_tokens, max(1, config.layout.dp)
    if step_tokens // dp < page_size:
        each = f" for each of layout.dp = {dp} groups" if dp > 1 else ""
        found.append(
            f"schedule.step_tokens is {step_tokens}, it must be at least cache.page_size = "
            f"{page_size}{each}: prompts are computed in whole pages"
        )
    if kv_tokens is not None and 1 <= kv_tokens < page_size:
        found.append(f"cache.kv_tokens is {kv_tokens}, it must hold a page of {page_size}")
    return found + _spec_findings(config.spec)


def _spec_findings(spec: Spec) -> list[str]:
    """What is set in vain: whoever forgets the method would get no drafts and no word of it."""
    given = [
        name for name in ("path", "depth", "topk", "tokens") if getattr(spec, name) is not None
    ]
    if spec.method == "none" and given:
        names = ", ".join(f"spec.{name}" for name in given)
        return [f"{names} without spec.method: say who drafts"]
    if spec.method == "ngram" and spec.path is not None:
        return ["spec.path with spec.method ngram: n-gram drafts need no weights"]
    return []
