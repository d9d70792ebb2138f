"""What is read from ptxas and cuobjdump: of a written example, and of what `make cuda` built."""

import pytest

from csrc.cuda import build, report

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN6aserve3runINS_7NormRowEEEvT_' for 'sm_80'
ptxas info    : Function properties for _ZN6aserve3runINS_7NormRowEEEvT_
    24 bytes stack frame, 16 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 32 bytes smem, 440 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN6aserve3runINS_5FlashILi64ELb1ELi4ELb0EEEEEvT_' for \
'sm_90a'
ptxas info    : Function properties for _ZN6aserve3runINS_5FlashILi64ELb1ELi4ELb0EEEEEvT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 207 registers, used 1 barriers
"""
NORM = report.Kernel("NormRow", "sm_80", 40, 64, 24, 32)
FLASH = report.Kernel("Flash<64, true, 4, false>", "sm_90a", 207, 0, 0, 0)


def test_kernels_are_read_with_their_names_registers_and_spills() -> None:
    assert report.kernels(LOG) == [NORM, FLASH]


def test_what_is_over_its_limit_is_named_and_so_is_what_has_none() -> None:
    limits = {"NormRow": report.Limit(32, 16), "Gone": report.Limit(8)}
    assert report.over_limits([NORM, FLASH], limits) == [
        "NormRow on sm_80: registers 40, at most 32",
        "NormRow on sm_80: shared_bytes 32, at most 16",
        "NormRow on sm_80: spill_bytes 64, at most 0",
        "NormRow on sm_80: stack_bytes 24, at most 0",
        "Flash<64, true, 4, false> has no row in limits.toml",
        "limits.toml: no kernel is Gone",
    ]


def test_what_is_at_its_limit_passes() -> None:
    limits = {NORM.name: report.Limit(40, 32, 64, 24), FLASH.name: report.Limit(207)}
    assert report.over_limits([NORM, FLASH], limits) == []


def test_no_row_of_the_limits_allows_a_spill() -> None:
    limits = report.read_limits()
    assert limits
    assert {(limit.spill_bytes, limit.stack_bytes) for limit in limits.values()} == {(0, 0)}


def test_an_edit_of_a_header_is_another_object() -> None:
    """The cache goes by contents, and knows what a source includes."""
    names = {path.name for path in build.included(build.SOURCES / "attention.cu", {})}
    assert {"attention.cu", "flash_kernel.cuh", "flash.cuh", "index.h", "tree.h"} <= names
    assert "host_block.cuh" in names  # costs a build too many, never one too few


@pytest.fixture(scope="module")
def objects() -> dict[str, build.Object]:
    """Those of `make cuda`, if it was run since the last edit; nothing is compiled here."""
    try:
        tools = build.find_tools()
    except build.BuildError as error:
        pytest.skip(str(error))
    version = build.version_of(tools)
    found = {source: build.cached(tools, version, source) for source in build.sources()}
    missing = [source for source, place in found.items() if place is None]
    if missing:
        pytest.skip(f"not built since the last edit: {', '.join(missing)}: run `make cuda`")
    return {source: place for source, place in found.items() if place is not None}


def test_what_was_built_is_within_its_limits(objects: dict[str, build.Object]) -> None:
    kernels = [kernel for one in objects.values() for kernel in report.kernels(one.log)]
    assert {kernel.arch for kernel in kernels} == {"sm_80", "sm_90a"}
    assert report.over_limits(kernels, report.read_limits()) == []


@pytest.mark.slow
def test_machine_code_without_tensor_cores_is_told_from_that_with_them(
    objects: dict[str, build.Object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two objects: `make cuda` looks at all, and the others take long to write out."""
    if report.find_cuobjdump() is None:
        pytest.skip("no cuobjdump")
    monkeypatch.setattr(report, "INSTRUCTIONS", {"gemm_sm80.cu": ("HMMA.16816.F32.BF16", "LDGSTS")})
    assert report.missing_instructions({"gemm_sm80.cu": objects["gemm_sm80.cu"].path}) == []
    assert report.missing_instructions({"gemm_sm80.cu": objects["rows.cu"].path}) == [
        "gemm_sm80.cu: no HMMA.16816.F32.BF16 in its code",
        "gemm_sm80.cu: no LDGSTS in its code",
    ]


def test_the_library_built_loads_anywhere_and_says_what_it_has_no_device_for() -> None:
    from aserve.errors import ConfigError
    from aserve.tensor import cuda_library as abi

    if not abi.PATH.exists():
        pytest.skip("not built: run `make cuda`")
    library = abi.Library()
    assert not library.is_host
    if library.devices > 0:
        pytest.skip("there is a device")
    with pytest.raises(ConfigError, match=r"^no CUDA device: .+ \(\d+\)$"):
        abi.open_library()
