"""The repository as data: files, modules, imports, functions. `python tests/tree.py` prints sizes.

Read from the AST alone; nothing of aserve is imported or run.
"""

import ast
import functools
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON_FOLDERS = ("aserve", "bench", "tests")
SOURCE_SUFFIXES = {".py", ".h", ".inc", ".cuh", ".cpp", ".cu"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".toml", ".sh", ""}
SKIPPED = {"__pycache__", ".venv", ".git", "build", "dist"}


class Function(NamedTuple):
    path: str
    name: str
    line: int
    n_lines: int
    n_parameters: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}"


class Import(NamedTuple):
    target: str  # dotted: a module, or a name inside one
    line: int
    at_import: bool  # runs when the module is imported: not in a function, not for types only


@functools.cache
def files(suffixes: frozenset[str] = frozenset(TEXT_SUFFIXES)) -> tuple[pathlib.Path, ...]:
    """Our own files, sorted; build outputs and caches left out."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in (*PYTHON_FOLDERS, "csrc", "conf", ".ci"):
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    ours = (path for path in found if not SKIPPED & set(path.relative_to(ROOT).parts))
    return tuple(sorted(path for path in ours if path.suffix in suffixes))


def python_files(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for path in files(frozenset({".py"})):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] in folders:
            yield name, parsed(name)


@functools.cache
def parsed(name: str) -> ast.Module:
    return ast.parse((ROOT / name).read_text(encoding="utf-8"), filename=name)


def module_name(path: str) -> str:
    """`aserve/core/__init__.py` is `aserve.core`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.Module) -> Iterator[Import]:
    yield from _imports(tree.body, at_import=True)


def _imports(body: list[ast.stmt], at_import: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from (Import(name.name, node.lineno, at_import) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import keeps its dots: no floor allows it, since it hides where it goes.
            module = "." * node.level + (node.module or "")
            for name in node.names:
                yield Import(f"{module}.{name.name}", node.lineno, at_import)
        else:
            now = at_import and not _later(node)
            for block in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, block, []), now)
            for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _imports(handler.body, now)


def _later(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def functions(*folders: str) -> Iterator[Function]:
    for path, tree in python_files(*folders):
        yield from _functions(path, tree, "")


def _functions(path: str, node: ast.AST, prefix: str) -> Iterator[Function]:
    for child in ast.iter_child_nodes(node):
        name = prefix + (getattr(child, "name", None) or "")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            assert child.end_lineno is not None
            n_lines = child.end_lineno - child.lineno + 1
            yield Function(path, name, child.lineno, n_lines, _n_parameters(child))
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _functions(path, child, f"{name}." if named else prefix)


def _n_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (bool(names) and names[0] in ("self", "cls"))


def n_lines(path: pathlib.Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _print_sizes() -> None:
    per_folder: Counter[str] = Counter()
    for path in files(frozenset(SOURCE_SUFFIXES)):
        parts = path.relative_to(ROOT).parent.parts
        per_folder["/".join(parts[:2]) or "."] += n_lines(path)
    print("lines per folder")
    for folder, count in sorted(per_folder.items()):
        print(f"  {count:6d}  {folder}")
    print(f"  {per_folder.total():6d}  in all")
    print("longest functions")
    for function in sorted(functions(*PYTHON_FOLDERS), key=lambda f: (-f.n_lines, str(f)))[:10]:
        print(f"  {function.n_lines:6d}  {function}")


if __name__ == "__main__":
    _print_sizes()
