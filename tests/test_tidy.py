"""The house rules, checked over the tree: floors, cycles, sizes, banned names, docstrings."""

import ast
import re
import sys
from collections.abc import Iterator

import pytest

from tests import tree

# What each floor may import beside the standard library and itself. `aserve` modules by package,
# others by their top-level name. A package may import only what stands in its row.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "core": {"errors", "msgspec"},
    "text": {"errors", "core", "gguf", "jinja2", "llguidance", "msgspec", "numpy", "tokenizers"},
    "tensor": {"errors", "core", "text", "_native", "msgspec", "numpy", "torch"},
    "models": {
        *("errors", "core", "text", "tensor", "_native", "numpy", "torch", "msgspec"),
        *("gguf", "huggingface_hub", "safetensors"),
    },
    "runner": {
        *("errors", "core", "text", "tensor", "models", "_native", "msgspec", "numpy", "torch"),
    },
    "wire": {"errors", "core", "msgspec", "trio"},
    "planes": {
        "errors",
        "core",
        "wire",
        "tensor.collective",
        "_native",
        "greenlet",
        "msgspec",
        "outcome",
        "torch",
        "trio",
    },
    "actors": {
        *("errors", "core", "text", "tensor", "models", "runner", "wire", "planes"),
        *("msgspec", "numpy", "outcome", "torch", "tqdm", "trio"),
    },
    "api": {
        *("errors", "core", "text", "actors"),
        *("h11", "hypercorn", "msgspec", "prometheus_client", "starlette", "trio"),
    },
    "training": {
        *("errors", "core", "text", "tensor", "models", "runner", "actors"),
        *("msgspec", "numpy", "safetensors", "torch", "trio"),
    },
    "cli": {
        *("errors", "core", "text", "actors", "api", "bench", "training"),
        *("msgspec", "tqdm", "trio"),
    },
}
NOT_IN_CORE = {
    *("asyncio", "multiprocessing", "os", "pathlib", "random", "secrets", "select", "selectors"),
    *("signal", "socket", "ssl", "subprocess", "threading", "time", "uuid"),
}
# Imported from no lower floor; the second may reach everything and is reached by tests, and by the
# one command that runs simulations.
ONLY_FROM_CLI = "aserve.bench"
ONLY_FROM_TESTS = "aserve.testing"
MAY_SIMULATE = "aserve/cli/sim.py"

BANNED_FILES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
BANNED_IMPORTS = {"cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
BANNED_CALLS = {
    "eval": "data is data, never code",
    "exec": "data is data, never code",
    "torch.load": "it unpickles; weights are safetensors or GGUF",
}
# The HTTP edge (a request, a connection) answers and serves on; the launcher reports a crash.
MAY_CATCH_ALL = {"aserve/actors/launch.py", "aserve/api/edge.py", "aserve/api/web.py"}
MAY_PRINT = ("aserve/cli/", "aserve/bench/", "bench/", "tests/", "setup.py")

FUNCTION_LINES, FILE_LINES, PARAMETERS = 60, 400, 6
# Debts, `path name` to size. A row may only shrink, and goes when its function is in bounds.
LONG_FUNCTIONS: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}
MANY_PARAMETERS: dict[str, int] = {}

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+|opt/(?:wheels|pypi)|tmp/\w+)\b")


def report(findings: list[str], rule: str) -> None:
    if findings:
        pytest.fail(rule + "\n  " + "\n  ".join(findings), pytrace=False)


def floor_of(path: str) -> str:
    return path.split("/")[1].removesuffix(".py")


def imported(target: str) -> str:
    """The name a row of FLOORS would use: a package of aserve, or another's top-level name."""
    parts = target.split(".")
    if parts[0] != "aserve":
        return parts[0]
    return ".".join(parts[1:2]) or "aserve"


def allowed(target: str, floor: str) -> bool:
    name = imported(target)
    if name in sys.stdlib_module_names:
        return floor != "core" or name not in NOT_IN_CORE
    if target in ("aserve", "aserve.__version__"):
        return floor in ("api", "cli")
    inside = target.removeprefix("aserve.")
    rows = FLOORS[floor] | {floor}
    return name in rows or any(inside == row or inside.startswith(row + ".") for row in rows)


def simulates(path: str, target: str) -> bool:
    return path == MAY_SIMULATE and target.startswith(ONLY_FROM_TESTS)


def test_each_floor_imports_only_what_its_row_allows() -> None:
    findings = []
    for path, module in tree.python_files("aserve"):
        if (floor := floor_of(path)) in FLOORS:
            findings += [
                f"{path}:{item.line} imports {item.target}"
                for item in tree.imports(module)
                if not (allowed(item.target, floor) or simulates(path, item.target))
            ]
    report(findings, "a lower floor knows nothing of a higher one (FLOORS in tests/test_tidy.py)")


@pytest.mark.parametrize(
    ("target", "floor", "verdict"),
    [
        ("json", "core", True),
        ("time.monotonic", "core", False),
        ("torch", "core", False),
        ("aserve.core.config.Config", "tensor", True),
        ("aserve.tensor.ops.Ops", "planes", False),
        ("aserve.tensor.collective.Collective", "planes", True),
        ("aserve.runner.runner.Runner", "api", False),
        ("aserve.open_engine", "core", False),
        ("aserve.__version__", "api", True),
    ],
)
def test_the_floor_rule_tells_right_from_wrong(target: str, floor: str, verdict: bool) -> None:
    assert allowed(target, floor) is verdict


def test_a_circle_of_imports_is_seen() -> None:
    assert list(cycles({"a": {"b"}, "b": {"a"}, "c": set()})) == ["a -> b", "b -> a"]
    assert list(cycles({"a": {"b"}, "b": {"c"}, "c": set()})) == []


def test_every_package_has_a_floor() -> None:
    known = {*FLOORS, "__init__", "__main__", "bench", "testing"}
    findings = {floor_of(path) for path, _ in tree.python_files("aserve")} - known
    report(sorted(findings), "a package of aserve stands on no floor; give it a row in FLOORS")


def test_bench_is_reached_from_the_command_line_alone_and_testing_from_tests_and_sim() -> None:
    findings = []
    for path, module in tree.python_files("aserve"):
        for item in tree.imports(module):
            may_test = floor_of(path) == "testing" or simulates(path, item.target)
            if item.target.startswith(ONLY_FROM_TESTS) and not may_test:
                findings.append(f"{path}:{item.line} imports {item.target}")
            lazily_from_cli = floor_of(path) == "cli" and not item.at_import
            may_bench = floor_of(path) in ("bench", "testing") or lazily_from_cli
            if item.target.startswith(ONLY_FROM_CLI) and not may_bench:
                findings.append(f"{path}:{item.line} imports {item.target}")
    report(findings, "testing is for tests; bench is for the command, which imports it when asked")


def test_no_module_imports_itself_through_others() -> None:
    modules = {tree.module_name(path): module for path, module in tree.python_files("aserve")}
    edges: dict[str, set[str]] = {}
    for name, module in modules.items():
        targets = (item.target for item in tree.imports(module) if item.at_import)
        found = (t if t in modules else t.rpartition(".")[0] for t in targets)
        edges[name] = {t for t in found if t in modules and t != name}
    report(list(cycles(edges)), "imports go round in a circle; one of these knows too much")


def cycles(edges: dict[str, set[str]]) -> Iterator[str]:
    """Peel modules that import nothing left; what cannot be peeled lies on a cycle or above one."""
    left = dict(edges)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    for name, targets in sorted(left.items()):
        yield f"{name} -> {', '.join(sorted(targets & left.keys()))}"


def test_functions_are_one_screen() -> None:
    found = {f"{f.path} {f.name}": f.n_lines for f in tree.functions("aserve", "bench", "tests")}
    report(over(found, FUNCTION_LINES, LONG_FUNCTIONS), "functions have at most 60 lines")


def test_files_are_one_thought() -> None:
    sources = tree.files(frozenset(tree.SOURCE_SUFFIXES))
    found = {path.relative_to(tree.ROOT).as_posix(): tree.n_lines(path) for path in sources}
    report(over(found, FILE_LINES, LONG_FILES), "files have at most 400 lines")


def test_functions_take_at_most_six_parameters() -> None:
    found = {f"{f.path} {f.name}": f.n_parameters for f in tree.functions("aserve", "bench")}
    report(over(found, PARAMETERS, MANY_PARAMETERS), "a function takes at most six parameters")


def over(found: dict[str, int], limit: int, debts: dict[str, int]) -> list[str]:
    findings = [
        f"{name}: {size}, allowed {debts.get(name, limit)}"
        for name, size in found.items()
        if size > debts.get(name, limit)
    ]
    return findings + [
        f"{name}: the debt row says {debt}, it is now {found.get(name, 0)}: lower or remove the row"
        for name, debt in debts.items()
        if found.get(name, 0) < debt
    ]


def test_no_file_is_named_for_nothing() -> None:
    names = [path.relative_to(tree.ROOT) for path in tree.files()]
    findings = [str(name) for name in names if {name.stem, *name.parent.parts} & BANNED_FILES]
    report(findings, "name the noun; utils, common, helpers, manager, misc and base are not nouns")


def test_nothing_unpickles_or_runs_data() -> None:
    findings = []
    for path, module in tree.python_files("aserve", "bench", "tests"):
        findings += [
            f"{path}:{item.line} imports {item.target}"
            for item in tree.imports(module)
            if item.target.split(".")[0] in BANNED_IMPORTS
        ]
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and (why := BANNED_CALLS.get(ast.unparse(node.func))):
                findings.append(f"{path}:{node.lineno} calls {ast.unparse(node.func)}: {why}")
    report(findings, "banned: pickle in every form, eval, exec, torch.load")


def test_only_the_edge_catches_everything() -> None:
    findings = []
    for path, module in tree.python_files("aserve"):
        for node in ast.walk(module):
            if isinstance(node, ast.ExceptHandler) and catches_all(node):
                what = ast.unparse(node.type) if node.type else ""
                findings.append(f"{path}:{node.lineno} except {what}")
    allowed = [f for f in findings if f.split(":")[0] not in MAY_CATCH_ALL]
    report(allowed, "name the error; only the HTTP edge and the launcher catch all")


def catches_all(node: ast.ExceptHandler) -> bool:
    """A handler of everything that does not raise again."""
    names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {""}
    raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
    return bool(names & {"", "Exception", "BaseException"}) and not raises


def test_only_the_command_prints() -> None:
    findings = []
    for path, module in tree.python_files("aserve"):
        findings += [
            f"{path}:{node.lineno}"
            for node in ast.walk(module)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        ]
    report([f for f in findings if not f.startswith(MAY_PRINT)], "log, or return it; do not print")


def test_every_module_says_what_it_is() -> None:
    modules = tree.python_files("aserve", "bench", "tests")
    report([path for path, m in modules if not ast.get_docstring(m)], "a module has a docstring")


def test_no_file_knows_one_machine() -> None:
    findings = []
    for path in tree.files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MACHINE_PATH.search(line) and "MACHINE_PATH" not in line:
                findings.append(f"{path.relative_to(tree.ROOT)}:{number} {line.strip()[:80]}")
    report(findings, "a path of one machine; take it from a setting, a fixture or the user")


def test_nothing_is_left_for_later() -> None:
    words = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|NotImplemented" + r"Error")
    findings = []
    for path in tree.files(frozenset(tree.SOURCE_SUFFIXES)):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if words.search(line):
                findings.append(f"{path.relative_to(tree.ROOT)}:{number} {line.strip()[:80]}")
    report(findings, "finish it, or file an issue")
