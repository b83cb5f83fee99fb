"""The user's environment variables, without values overridden for a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata


def read_package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return package → version, for installed packages."""
    versions = {package: _read_installed_version(package) for package in packages}
    return {package: version for package, version in versions.items() if version is not None}


@cache
def _read_installed_version(package: str) -> str | None:
    # Python parses the package's whole description, in milliseconds.
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None  # frameworks have several packages (tensorflow-cpu)


#: Digits of a number of threads, which libraries store in 32 bits.
_MAX_DIGITS = 9
#: Variables with thread counts, read by numerical libraries when loaded.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: Prefixes of variables that affect numerics or select devices.
_NUMERIC = (
    "ATEN_",
    "DNNL_",
    "GOMP_",
    "MKL_",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "ORT_",
    "TF_",
    "TORCH_",
    "XLA_",
    "CUDA_VISIBLE_DEVICES",
)
#: Overridden variable → the user's value; None if unset.
_hidden: dict[str, str | None] = {}


def restore_users_environment() -> dict[str, str]:
    """Return all variables, with those overridden by `override_variables` restored."""
    variables = {key: value for key, value in os.environ.items() if key not in _hidden}
    return {**variables, **{key: value for key, value in _hidden.items() if value is not None}}


def override_variables(prefix: str, values: Mapping[str, str]) -> None:
    """Replace all variables with a prefix, saving the user's values."""
    restore_variables(prefix)
    touched = {*values, *(key for key in os.environ if key.startswith(prefix))}
    for key in touched:
        _hidden[key] = os.environ.pop(key, None)
    os.environ.update(values)


def restore_variables(prefix: str) -> None:
    """Undo `override_variables`."""
    for key in [key for key in _hidden if key.startswith(prefix)]:
        os.environ.pop(key, None)
        value = _hidden.pop(key)
        if value is not None:
            os.environ[key] = value


def list_numeric_variables() -> dict[str, str]:
    """Return the user's variables that affect numerics, sorted by name."""
    variables = restore_users_environment()
    return {name: variables[name] for name in sorted(variables) if name.startswith(_NUMERIC)}


def read_omp_threads() -> int | None:
    """Return the threads of `OMP_NUM_THREADS`, of its outer level; None if not set.

    A value that is no number of threads counts as not set, as OpenMP ignores it with a warning.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    is_count = first.isascii() and first.isdecimal() and len(first) <= _MAX_DIGITS
    return int(first) or None if is_count else None
