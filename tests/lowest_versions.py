"""Print constraints.txt with what pyproject.toml promises at its lowest version, for `make test-lowest`."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOR_USERS = ("tensorboard", "gguf", "float8")
"""Extras whose packages the quick suite uses. What is only in `test` keeps the version of constraints.txt."""


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    promised = [*project["dependencies"], *(project["optional-dependencies"][name][0] for name in FOR_USERS)]
    lowest = dict(line.split(">=") for line in promised)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    unknown = lowest.keys() - tested
    assert not unknown, f"constraints.txt lacks {unknown}"
    print(*(f"{name}=={version}" for name, version in (tested | lowest).items()), sep="\n")


main()
