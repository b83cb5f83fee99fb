"""Commands that install what an extra of this package requires."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]
_DISTRIBUTION = "neural-mp"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, from any working directory.

    No package index has a release: a checkout installs its own extra, and an installed wheel lists
    the packages of the extra.
    """
    if (_CHECKOUT / "constraints.txt").is_file():
        return f"pip install -c '{_CHECKOUT}/constraints.txt' -e '{_CHECKOUT}[{extra}]'"
    lines = (line.partition(";") for line in metadata.requires(_DISTRIBUTION) or ())
    marker = f'extra == "{extra}"'
    needed = [package.strip() for package, _, condition in lines if marker in condition]
    return "pip install " + " ".join(f"'{package}'" for package in needed)
