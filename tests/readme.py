"""The parts of README.md that are generated from the code; `make readme` rewrites them."""

import pathlib
from collections.abc import Callable

from aserve.core.features import matrix
from aserve.core.settings import Setting, describe

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def settings() -> str:
    """Every configuration key as a Markdown table."""
    lines = ["| key | default | |", "|---|---|---|"]
    lines += [f"| `{one.key}` | {_default(one)} | {_meaning(one)} |" for one in describe()]
    return "\n".join(lines) + "\n"


def _default(setting: Setting) -> str:
    value = setting.default
    if value is None:
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _meaning(setting: Setting) -> str:
    choices = f" ({', '.join(setting.choices)})" if setting.choices else ""
    return (setting.help + choices).replace("|", "\\|")


PARTS: dict[str, Callable[[], str]] = {"features": matrix, "settings": settings}


def rendered(text: str) -> str:
    """`text` with every generated part as it should be."""
    for name, make in PARTS.items():
        head, mark, rest = text.partition(f"<!-- {name}: written by `make readme` -->\n")
        _, end, tail = rest.partition(f"<!-- end {name} -->")
        assert mark, f"README.md has no part {name}"
        assert end, f"README.md's part {name} has no end"
        text = head + mark + make() + end + tail
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
