"""README.md says what the code says."""

import re
import tomllib

import aserve
from aserve.cli import COMMANDS
from tests import readme, tree


def test_generated_parts_are_current() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.rendered(text) == text, "run `make readme`"


def test_every_command_of_the_tour_exists() -> None:
    text = readme.README.read_text(encoding="utf-8")
    named = set(re.findall(r"^aserve ([\w-]+)", text, re.MULTILINE))
    assert named
    assert named <= set(COMMANDS)


def test_every_make_target_of_the_readme_exists() -> None:
    text = readme.README.read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (tree.ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake (?:clean && make )?([a-z]+)\b(?=[\s`])", text))
    assert {"serve", "test"} <= named
    assert named <= targets


def test_every_file_linked_is_there() -> None:
    text = readme.README.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    missing = [link for link in links if "://" not in link and not (tree.ROOT / link).exists()]
    assert missing == []


def test_version_is_one() -> None:
    project = tomllib.loads((tree.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["version"] == aserve.__version__


def test_python_of_the_readme_compiles() -> None:
    text = readme.README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        compile(block, "README.md", "exec")
