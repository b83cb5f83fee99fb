"""How values are shown to people: by a module that is named from above, never imported here."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol, cast

_module = ""


class Displays(Protocol):
    """The functions of such a module."""

    def cell(self, value: Any, /) -> str:
        """HTML for a notebook's cell."""

    def table(self, value: Any, /) -> Any:
        """An object that rich prints."""

    def save_page(self, value: Any, path: str | Path, /) -> None:
        """Write a page of HTML into a file."""


def show_by(module: str) -> None:
    """Name the module; it is imported once something is shown."""
    global _module
    _module = module


def displays() -> Displays:
    """The module that shows values."""
    return cast(Displays, importlib.import_module(_module))


class Displayed:
    """A value that a notebook shows as HTML."""

    def _repr_html_(self) -> str:
        return displays().cell(self)
