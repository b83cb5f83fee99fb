"""Packages that this one can do without: their installation, and the data frames of pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from neural_mp.errors import MissingFrameworkError

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


def create_data_frame(columns: Mapping[str, Sequence[object]], index: str) -> Any:
    """Return a `pandas.DataFrame` with the given columns, one of which is its index.

    Raises:
        MissingFrameworkError: pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingFrameworkError(
            f"a data frame requires pandas: {install_command('pandas')}"
        ) from error
    return pd.DataFrame(dict(columns)).set_index(index)
