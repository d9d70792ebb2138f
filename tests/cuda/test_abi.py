"""The C ABI: what ctypes believes is what the header says, and what the libraries export."""

import ctypes
import pathlib
import re
import subprocess

import pytest

from aserve.errors import ConfigError
from aserve.tensor import cuda_library as abi
from aserve.tensor.cuda import open_cuda
from csrc.cuda import build

HEADER = (build.INCLUDE / "aserve" / "cuda.cuh").read_text(encoding="utf-8")
C_TYPES = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
STRUCTS = {
    value.__name__: value
    for value in vars(abi).values()
    if isinstance(value, type) and issubclass(value, ctypes.Structure)
}


def type_of(text: str) -> type:
    return ctypes.c_void_p if "*" in text else C_TYPES[text.replace("const", "").split()[0]]


def declared_structs() -> dict[str, list[tuple[str, type]]]:
    found: dict[str, list[tuple[str, type]]] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, re.DOTALL):
        fields = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            first, *others = line.split(",")
            kind, field = re.fullmatch(r"(.*[\s*])(\w+)", first).groups()
            fields += [(one.strip(), type_of(kind)) for one in (field, *others)]
        found[name] = fields
    return found


def declared_calls() -> dict[str, list[str]]:
    """Parameters of the functions that take a stream, without it."""
    found = {}
    for name, text in re.findall(r"int aserve_cuda_(\w+)\(([^)]*)\);", HEADER):
        parameters = [" ".join(one.split()) for one in text.split(",")]
        if parameters[-1] == "void* stream":
            found[name] = parameters[:-1]
    return found


def test_structs_are_those_of_the_header_field_by_field() -> None:
    wanted = declared_structs()
    assert set(STRUCTS) == set(wanted)
    for name, fields in wanted.items():
        assert [tuple(pair) for pair in STRUCTS[name]._fields_] == fields, name


def test_functions_take_what_the_header_says() -> None:
    wanted = declared_calls()
    assert set(abi.CALLS) == set(wanted)
    for name, parameters in wanted.items():
        for given, parameter in zip(abi.CALLS[name], parameters, strict=True):
            kind = parameter.rsplit(maxsplit=1)[0]
            if issubclass(given, ctypes.Structure):
                assert kind == f"const {given.__name__}*", name
            else:
                assert given is type_of(parameter), name


def test_a_compiler_lays_the_structs_out_alike(tmp_path: pathlib.Path) -> None:
    lines = ['#include <stdio.h>\n#include "aserve/cuda.cuh"\nint main(void) {']
    lines += [f'printf("{name} %zu\\n", sizeof({name}));' for name in STRUCTS]
    source = tmp_path / "sizes.c"
    source.write_text("\n".join([*lines, "return 0; }"]), encoding="utf-8")
    command = ["gcc", f"-I{build.INCLUDE}", str(source), "-o", str(tmp_path / "sizes")]
    subprocess.run(command, check=True)
    told = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    sizes = dict(line.split() for line in told.splitlines())
    assert sizes == {name: str(ctypes.sizeof(struct)) for name, struct in STRUCTS.items()}


def test_an_error_has_the_name_of_what_failed(host_library: pathlib.Path) -> None:
    library = abi.Library(host_library)
    with pytest.raises(abi.CudaError, match=r"logprobs: .* \(1\)"):
        library.call("logprobs", abi.Logprobs(top_n=129), stream=None)


def test_a_library_that_is_not_there_or_none_is_told_plainly(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="not built"):
        open_cuda(tmp_path / "libmissing.so")
    (tmp_path / "libtext.so").write_text("text", encoding="utf-8")
    with pytest.raises(ConfigError, match="do not load"):
        open_cuda(tmp_path / "libtext.so")
