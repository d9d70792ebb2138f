"""Builds the native kernels. Metadata and dependencies are in pyproject.toml."""

import pathlib

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = pathlib.Path(__file__).parent
# No contraction: a product and a sum are fused where the code says so, alike in every tile size.
FLAGS = ["-O3", "-g0", "-std=c++17", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"]
FLAGS += ["-Wall", "-Wextra", "-Wno-psabi"]
# The intrinsics of GCC 12 start from registers they leave unset on purpose.
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]


class BuildParallel(build_ext):
    """Compiles the files of the one extension side by side; setuptools only knows extensions."""

    def build_extension(self, ext: Extension) -> None:
        from concurrent.futures import ThreadPoolExecutor
        from os import cpu_count

        compile_all = self.compiler.compile

        def compile_each(sources, **options):
            with ThreadPoolExecutor(cpu_count() or 1) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_each
        super().build_extension(ext)


def relative(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob(pattern))


setup(
    ext_modules=[
        Extension(
            "aserve._native",
            sources=relative("**/*.cpp"),
            depends=relative("**/*.h") + relative("**/*.inc"),
            include_dirs=["csrc/include", pybind11.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
    cmdclass={"build_ext": BuildParallel},
)
