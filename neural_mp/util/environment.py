"""The environment as the user has it, without the variables that we set for a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from importlib import metadata


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Package → the version that is installed, of those that are."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue  # of a framework there may be several packages (tensorflow-cpu)
    return found


#: Where the libraries that compute look for the number of their threads, when they are loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: How the names of variables begin by which libraries decide how they compute, and on what.
_NUMERIC = (
    *("ATEN_", "DNNL_", "GOMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "ORT_"),
    *("TF_", "TORCH_", "XLA_", "CUDA_VISIBLE_DEVICES"),
)
#: Variable → what the user had there before we set it; None for nothing.
_hidden: dict[str, str | None] = {}


def users_environment() -> dict[str, str]:
    """Every variable, those that were set by `set_own` as they were before."""
    found = {key: value for key, value in os.environ.items() if key not in _hidden}
    return {**found, **{key: value for key, value in _hidden.items() if value is not None}}


def set_own(prefix: str, values: Mapping[str, str]) -> None:
    """Let just these be the variables that begin with a prefix; the user's are put aside."""
    restore_users(prefix)
    touched = {*values, *(key for key in os.environ if key.startswith(prefix))}
    for key in touched:
        _hidden[key] = os.environ.pop(key, None)
    os.environ.update(values)


def restore_users(prefix: str) -> None:
    """Undo `set_own`."""
    for key in [key for key in _hidden if key.startswith(prefix)]:
        os.environ.pop(key, None)
        value = _hidden.pop(key)
        if value is not None:
            os.environ[key] = value


def numeric_variables() -> dict[str, str]:
    """The user's variables by which libraries decide how they compute, by name."""
    found = users_environment()
    return {name: found[name] for name in sorted(found) if name.startswith(_NUMERIC)}
