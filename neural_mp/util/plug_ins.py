"""Plug-ins: objects of other packages, found by their entry points."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Container, Iterator
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.errors import NeuralMPError, one_line
from neural_mp.util.text import with_article

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    try:
        return tuple(metadata.entry_points(group=group))
    except Exception:  # of any type: a package has a damaged file
        logger.debug("entry points", exc_info=True)
        return tuple(_iterate_readable_entries(group))


def _iterate_readable_entries(group: str) -> Iterator[metadata.EntryPoint]:
    for distribution in metadata.distributions():
        try:
            yield from distribution.entry_points.select(group=group)
        except Exception as error:  # of any type, as above
            logger.warning(
                "the entry points of the package %r cannot be read: %s",
                distribution.metadata["Name"],
                one_line(error),
            )
            logger.debug("entry points", exc_info=True)


def load_object(entry: metadata.EntryPoint) -> Any:
    """Return the object of an entry point.

    Raises:
        ImportError: the import fails, in whatever way.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:  # of any type: the package runs its own code
        raise ImportError(f"cannot be imported: {one_line(error)}") from error


def load_plug_ins(group: str, reserved: Container[str], base: type) -> dict[str, Any]:
    """Return name → class of the entry points of a group, without names that are taken.

    A plug-in that cannot be imported, or is of no use, is left out with a warning, so that the
    others work.

    Args:
        group: the entry-point group.
        reserved: names that are taken.
        base: class that plug-ins must derive from.
    """
    loaded = {}
    for entry in read_entry_points(group):
        if entry.name in reserved:
            continue
        try:
            loaded[entry.name] = _load_class(entry, base)
        except ImportError as error:
            logger.warning("the plug-in %r %s", entry.value, error)
            logger.debug("import of %r", entry.value, exc_info=True)
    return loaded


def _load_class(entry: metadata.EntryPoint, base: type) -> type:
    """Return the class of an entry point.

    Raises:
        ImportError: the import fails, or yields anything else.
    """
    kind = load_object(entry)
    expected = f"must be a subclass of {base.__module__}.{base.__name__}"
    is_class = issubclass(type(kind), type)  # `isinstance` runs a property `__class__`
    if not (is_class and issubclass(kind, base)):
        actual = f"the class {kind.__name__}" if is_class else with_article(type(kind).__name__)
        raise ImportError(f"{expected}, got {actual}")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(vars(kind)["__abstractmethods__"]))
        raise ImportError(f"{expected} that defines {missing}")
    return kind


def create_plug_ins(kinds: dict[str, type[T]]) -> Iterator[tuple[str, T]]:
    """Yield name → new instance of each class, without those whose creation fails."""
    for name, kind in kinds.items():
        try:
            instance = kind()
        except Exception as error:  # of any type: the package runs its own code
            logger.warning("the plug-in %r cannot be created: %s", name, one_line(error))
            logger.debug("creation of %r", name, exc_info=True)
        else:
            yield name, instance


def create_plug_in(kind: type[T], refusal: type[NeuralMPError], what: str) -> T:
    """Return a new instance of the class of a plug-in.

    Raises:
        NeuralMPError: of the class `refusal`, if its code fails.
    """
    try:
        return kind()
    except Exception as error:  # of any type, as above
        raise refusal(f"{what} cannot be created: {one_line(error)}") from error


def require_importable(
    group: str, name: object, base: type, refusal: type[NeuralMPError], what: str
) -> None:
    """Raise if the plug-in of a name exists, but is of no use.

    Args:
        group: the entry-point group.
        name: the name that was asked for.
        base: class that plug-ins must derive from.
        refusal: class of the error.
        what: begin of its message.

    Raises:
        NeuralMPError: of the class `refusal`, if `load_plug_ins` leaves the plug-in out.
    """
    for entry in read_entry_points(group):
        if entry.name != name:
            continue
        try:
            _load_class(entry, base)
        except ImportError as error:
            raise refusal(
                f"{what}: {entry.value!r}, the entry point of an installed package, {error}"
            ) from error
