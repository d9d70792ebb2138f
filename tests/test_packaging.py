"""What a clean machine gets: declared dependencies, a set-up that says what is missing."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable

from tests import tree

PROJECT = tomllib.loads((tree.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


# Packages that are imported by another name than they are installed by.
INSTALLED_AS = {"yaml": "pyyaml"}
# What bench.install puts in environments of the peers' own, where their workers run.
OF_PEERS = {"openvino", "openvino_genai", "openvino_tokenizers", "optimum"}


def names(requirements: Iterable[str]) -> set[str]:
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {match[0].lower().replace("-", "_") for match in found if match}


def imported(*folders: str) -> set[str]:
    tops = {
        item.target.split(".")[0]
        for _, module in tree.python_files(*folders)
        for item in tree.imports(module)
    }
    tops = {INSTALLED_AS.get(top, top).lower() for top in tops}
    return tops - sys.stdlib_module_names - {"aserve", "bench", "csrc", "tests"}


def test_every_package_imported_is_declared() -> None:
    declared = names(PROJECT["dependencies"])
    assert imported("aserve") - declared == set()


def test_every_package_declared_is_imported() -> None:
    assert names(PROJECT["dependencies"]) - imported("aserve") == set()


def test_every_package_of_the_tests_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]["test"]
    declared = names([*PROJECT["dependencies"], *extras])
    assert imported("aserve", "bench", "tests") - declared - OF_PEERS - {""} == set()


def test_requirements_are_those_of_the_project() -> None:
    script = str(tree.ROOT / ".ci" / "requirements.py")
    command = [sys.executable, script]
    plain = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    extra = subprocess.run([*command, "test"], check=True, capture_output=True, text=True).stdout
    assert set(PROJECT["dependencies"]) < set(plain.splitlines())
    assert extra.splitlines() == PROJECT["optional-dependencies"]["test"]


def test_a_machine_without_a_compiler_is_told_so(tmp_path: pathlib.Path) -> None:
    script = str(tree.ROOT / ".ci" / "prerequisites.py")
    env = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, script], env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "this machine lacks a C++ compiler" in done.stderr
    assert "apt install g++" in done.stderr


def test_make_reinstalls_nothing_when_nothing_changed(tmp_path: pathlib.Path) -> None:
    """Fresh stamps: a second `make setup` runs no pip; an edit in csrc only builds."""
    copy = tmp_path / "copy"
    for name in ("csrc", ".ci", ".venv/bin"):
        (copy / name).mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "setup.py", ".ci/requirements.py"):
        (copy / name).write_bytes((tree.ROOT / name).read_bytes())
    source = copy / "csrc" / "some.cpp"
    source.touch()
    (copy / ".venv" / "bin" / "python").touch()
    for number, stamp in enumerate(("torch", "packages", "native", "test")):
        path = copy / ".venv" / f"stamp-{stamp}"
        path.touch()
        os.utime(path, (4e9 + number, 4e9 + number))
    assert planned(copy) == ""
    os.utime(source, (5e9, 5e9))
    again = planned(copy)
    assert "--editable ." in again
    assert "-r .venv/requirements" not in again


def planned(folder: pathlib.Path) -> str:
    command = ["make", "--dry-run", "--silent", "-C", str(folder), "setup-test"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("make["))
