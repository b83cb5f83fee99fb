"""Versions of what is installed."""

from __future__ import annotations

from collections.abc import Iterable
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
