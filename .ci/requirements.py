"""Prints, one a line, what pyproject.toml says aserve needs: to build and run, or for an extra."""

import pathlib
import sys
import tomllib


def main(extras: list[str]) -> None:
    path = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))
    needed = [] if extras else [*project["build-system"]["requires"]]
    needed += [] if extras else project["project"]["dependencies"]
    for extra in extras:
        needed += project["project"]["optional-dependencies"][extra]
    print("\n".join(needed))


if __name__ == "__main__":
    main(sys.argv[1:])
