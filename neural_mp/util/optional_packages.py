"""Packages that this one can do without: installation, data frames, logs, `transformers`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from neural_mp.errors import DataError, MissingFrameworkError

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


def refuse_data_frame(name: str, value: object) -> None:
    """Check that `value` is not a data frame, which yields the names of its columns.

    Raises:
        DataError: the value is a data frame of pandas, Polars or another library.
    """
    if type(value).__name__ == "DataFrame":
        raise DataError(
            f"{name} must hold samples or batches, got a DataFrame; give its arrays: "
            f"ArrayDataset(frame[columns].to_numpy('float32'), frame['label'].to_numpy()) of "
            f"neural_mp.data"
        )


@contextmanager
def silence_optuna_log() -> Iterator[None]:
    """Limit Optuna's log to warnings in this context."""
    with warnings.catch_warnings():
        # In a notebook without widgets, the first import warns about Optuna's own progress bar.
        warnings.filterwarnings("ignore", message="IProgress not found")
        import optuna

    previous = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(previous)


@contextmanager
def quiet_and_offline_transformers() -> Iterator[None]:
    """Switch `transformers` and its hub offline, as `HF_HUB_OFFLINE=1` does, and hide its output.

    Hidden are progress bars, and reports that list every name of a file with control characters.
    """
    hf_logging: Any = importlib.import_module("transformers.utils.logging")
    constants: Any = importlib.import_module("huggingface_hub.constants")
    hub: Any = importlib.import_module("transformers.utils.hub")
    level, shows_progress = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    switches = [(constants, "HF_HUB_OFFLINE"), (hub, "_is_offline_mode")]
    originals = [
        (where, name, getattr(where, name)) for where, name in switches if hasattr(where, name)
    ]
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        for where, name, _ in originals:
            setattr(where, name, True)
        yield
    finally:
        for where, name, value in originals:
            setattr(where, name, value)
        hf_logging.set_verbosity(level)
        if shows_progress:
            hf_logging.enable_progress_bar()
