"""Plug-ins: objects of other packages, found by their entry points."""

from __future__ import annotations

import logging
import sys
from collections.abc import Container
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from neural_mp.errors import NeuralMPError, one_line

logger = logging.getLogger(__name__)


def read_entry_points(group: str) -> tuple[metadata.EntryPoint, ...]:
    """Return the entry points of a group, read again once a folder of `sys.path` has changed."""
    return _read_group_entries(group, tuple(_folder_and_mtime(entry) for entry in sys.path))


def _folder_and_mtime(entry: str) -> tuple[str, int | None]:
    """Return a folder and when a package in it was last installed or removed."""
    try:
        folder = Path(entry).absolute()
        return str(folder), folder.stat().st_mtime_ns
    except OSError:
        return entry, None


@lru_cache(maxsize=64)
def _read_group_entries(
    group: str, folders: tuple[tuple[str, int | None], ...]
) -> tuple[metadata.EntryPoint, ...]:
    # Python opens a file of every installed package: milliseconds each time.
    return tuple(metadata.entry_points(group=group))


def load_plug_ins(group: str, reserved: Container[str]) -> dict[str, Any]:
    """Return name → object of the entry points of a group, without names that are taken.

    A plug-in that cannot be imported is left out with a warning, so that the others work.
    """
    loaded = {}
    for entry in read_entry_points(group):
        if entry.name in reserved:
            continue
        try:
            loaded[entry.name] = entry.load()
        except Exception as error:  # of any type: the package runs its own code
            logger.warning("the plug-in %r cannot be imported: %s", entry.value, one_line(error))
            logger.debug("import of %r", entry.value, exc_info=True)
    return loaded


def require_importable(group: str, name: object, refusal: type[NeuralMPError], what: str) -> None:
    """Raise if the plug-in of a name exists, but cannot be imported.

    Args:
        group: the entry-point group.
        name: the name that was asked for.
        refusal: class of the error.
        what: begin of its message.

    Raises:
        NeuralMPError: of the class `refusal`, if the import fails.
    """
    for entry in read_entry_points(group):
        if entry.name != name:
            continue
        try:
            entry.load()
        except Exception as error:  # of any type, as above
            raise refusal(
                f"{what}: {entry.value!r}, the entry point of an installed package, cannot be "
                f"imported: {one_line(error)}"
            ) from error
