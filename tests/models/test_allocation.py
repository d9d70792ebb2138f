"""A step takes nothing from the allocator: what kernels work in was taken by the first such."""

import pathlib
import subprocess
import sys

import pytest

from tests import tree
from tests.models.families import saved

SMALL = 4096  # bytes: the arguments of a call, views of tensors


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = tmp_path_factory.mktemp("counter") / "counted_malloc.so"
    source = pathlib.Path(__file__).with_name("counted_malloc.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_all_layers_of_a_stage_allocate_nothing_but_what_they_return(
    counter: pathlib.Path, threads: int
) -> None:
    counts = ("1", "8", "33", "100")
    command = [sys.executable, "-m", "tests.models.allocating", str(saved("llama")[0])]
    done = subprocess.run(
        [*command, str(threads), *counts],
        env={"LD_PRELOAD": str(counter), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tree.ROOT)},
        cwd=tree.ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    taken = [int(one) for one in done.stdout.split()]
    assert len(taken) == len(counts)
    assert max(taken) < SMALL, taken
