"""Says what a machine lacks before `make` creates .venv, all at once; runs on any Python 3."""

import importlib.util
import os
import shutil
import sys
import sysconfig


def missing():
    if sys.version_info < (3, 11):  # noqa: UP036  this very script runs on any
        this = ".".join(map(str, sys.version_info[:2]))
        yield f"Python 3.11 or newer (this is {this}); name one: make PYTHON=python3.11", None
    if not all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")):
        yield "Python's venv module", "python3-venv"
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        yield "Python's headers, to build the native code", "python3-dev"
    if not shutil.which(os.environ.get("CXX", "g++").split()[0]):
        yield "a C++ compiler", "g++"


def main():
    found = list(missing())
    for what, _ in found:
        print(f"make: this machine lacks {what}", file=sys.stderr)
    packages = [package for _, package in found if package]
    if packages:
        print(f"make: on Debian: apt install {' '.join(packages)}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
