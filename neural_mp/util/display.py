"""Display of values by a module registered at run time, to avoid an import cycle."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

_module = ""


class Displays(Protocol):
    """Functions of the display module."""

    def cell(self, value: Any, /) -> str:
        """Return HTML for a notebook cell."""

    def text(self, value: Any, /) -> str:
        """Return plain text for `print`."""

    def table(self, value: Any, /) -> Any:
        """Return an object that rich prints."""

    def save_page(self, value: Any, path: str | Path, /) -> None:
        """Write an HTML page to a file."""


def show_by(module: str) -> None:
    """Register the display module, imported on first use."""
    global _module
    _module = module


def displays() -> Displays:
    """Return the display module."""
    return cast(Displays, importlib.import_module(_module))


class Displayed:
    """A value displayed as HTML in notebooks."""

    def _repr_html_(self) -> str:
        return displays().cell(self)


class Printed(Displayed):
    """A value displayed as HTML in notebooks, and printed as a table."""

    def __str__(self) -> str:
        return displays().text(self)
