"""Flags every command shares: the model, a TOML file, each configuration key as a dotted flag."""

import argparse
import contextlib
import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from aserve.cli.outcome import say
from aserve.core.config import Config
from aserve.core.features import explain
from aserve.core.settings import Setting, describe, merge
from aserve.errors import ConfigError

DOTTED = re.compile(r"--([A-Za-z][\w-]*\.[\w.-]+)(=.*)?$", re.DOTALL)
DEST = "setting "  # a prefix no other flag's name has
# Keys that have a short flag in every command.
SHORT = {
    "model.weights": "--weights",
    "ranks.live": "--ranks",
    "layout.numerics": "--numerics",
}


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviations, and `--cache.page-size` for `--cache.page_size`."""

    def __init__(self, name: str, description: str, *, usage: str = "") -> None:
        super().__init__(
            f"aserve {name}",
            usage=f"aserve {name} {usage}",
            description=description,
            allow_abbrev=False,
        )

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Unknown dotted flags are refused with the nearest known one."""
        spelt = [_underscored(argument) for argument in args]
        known = set(self._option_string_actions)
        unknown = [flag for one in spelt if (flag := _dotted(one)) and flag not in known]
        for flag in unknown:
            near = difflib.get_close_matches(flag, known, n=1)
            say(f"there is no {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        if unknown:
            self.exit(2)
        parsed: argparse.Namespace = super().parse_args(spelt, namespace)
        return parsed


def _dotted(argument: str) -> str | None:
    found = DOTTED.match(argument)
    return f"--{found[1]}" if found else None


def _underscored(argument: str) -> str:
    found = DOTTED.match(argument)
    return f"--{found[1].replace('-', '_')}{found[2] or ''}" if found else argument


def add_model_flags(
    parser: argparse.ArgumentParser, aliases: Mapping[str, tuple[str, str]] | None = None
) -> None:
    """MODEL, --config and the dotted flags. `aliases` maps keys to a short flag and its metavar."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="smollm2, a folder in Hugging Face layout, a .gguf file or a hub name",
    )
    add_config_flags(parser, aliases or {})


def add_config_flags(
    parser: argparse.ArgumentParser, aliases: Mapping[str, tuple[str, str]]
) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML; flags go over it")
    groups: dict[str, Any] = {}
    for setting in describe():
        section = setting.key.split(".")[0]
        if section not in groups:
            groups[section] = parser.add_argument_group(f"configuration: {section}")
        short, metavar = aliases.get(setting.key, (SHORT.get(setting.key), _metavar(setting)))
        names = [f"--{setting.key}"] if short is None else [short, f"--{setting.key}"]
        groups[section].add_argument(
            *names, dest=DEST + setting.key, metavar=metavar, help=_help(setting)
        )


def _metavar(setting: Setting) -> str:
    names = {"int": "N", "float": "X", "bool": "true|false"}
    if setting.choices:
        return "|".join(setting.choices)
    return names.get(setting.type.split(" ")[0], "TEXT")


def _help(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    shown = str(setting.default).lower() if isinstance(setting.default, bool) else setting.default
    return text if shown is None or "default:" in text else f"{text} (default: {shown})"


def config_of(arguments: argparse.Namespace) -> Config:
    """Defaults, the TOML file and the flags as one. Raises ConfigError with every finding."""
    given = vars(arguments)
    overrides = {
        name.removeprefix(DEST): value
        for name, value in given.items()
        if name.startswith(DEST) and value is not None
    }
    if given.get("model") is not None:
        overrides["model.path"] = given["model"]
    table = read_toml(arguments.config) if arguments.config else {}
    findings: list[str] = []
    try:
        config = merge(Config(), table, overrides)
    except ConfigError as error:
        findings += error.findings
        config = _sound_part(table, overrides)
    findings += [str(finding) for finding in explain(config)]
    if findings:
        raise ConfigError(findings)
    return config


def _sound_part(table: Mapping[str, Any], overrides: Mapping[str, str]) -> Config:
    """What is left without the keys that are wrong by themselves, to find what else is wrong."""
    config = Config()
    for section, keys in table.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else ():
            with contextlib.suppress(ConfigError):
                config = merge(config, {section: {key: value}})
    for key, text in overrides.items():
        with contextlib.suppress(ConfigError):
            config = merge(config, {}, {key: text})
    return config


def read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{path}: {error}") from error
