"""Descriptions of values for messages: `float32[8, 10]`, `a tuple of int64[8] and None`; and CSV.

CSV is safe for spreadsheet programs, which run cells that look like formulas.
"""

from __future__ import annotations

import csv
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

#: Starts of formulas, and of whitespace before formulas, as listed by OWASP.
_FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
#: A formula after a separator that a spreadsheet program may assume in place of the actual one, or
#: a break of the line.
_HIDDEN_FORMULA = re.compile(r"[,;\t|]\s*[=+\-@＝＋－＠]|[\r\n]")


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 evaluation`, `2 evaluations`, `2 axes`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """Return a noun with `a` or `an`, by pronunciation: `an array`, `a tuple`."""
    name = noun.strip("'\"`")
    silent = name[:4].lower() in ("hour", "hone")
    like_you = name[:3].lower() in ("uni", "uin", "use", "uti", "one")
    # Acronyms are spelled out: an RMSE, an MSE, an F1, a URL; some are not: a BERT.
    spelled = len(name) > 1 and name[:2] == name[:2].upper() and name[0] in "FHLMNRSX"
    spelled = spelled or name[:2] == "nd"  # an ndarray
    vowel = name[:1].lower() in tuple("aeiou")
    return f"{'an' if silent or spelled or (vowel and not like_you) else 'a'} {noun}"


#: Maximum listed parts of a tuple or dict.
_MAX_LISTED = 4


def describe_value_shape(value: object) -> str:
    """Return dtype and shape of an array, the parts of a container, or else the type."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        try:
            sizes = ", ".join(map(str, value.shape))
        except (TypeError, ValueError):  # TensorFlow: unknown rank
            sizes = "?"
        return f"{str(value.dtype).rpartition('.')[2]}[{sizes}]"
    name = type(value).__name__
    if isinstance(value, Mapping):
        parts = [
            f"{key!r}: {describe_value_shape(item)}"
            for key, item in _take_first_items(value.items())
        ]
        return f"{with_article(name)} of {len(value)} ({', '.join(parts)})"
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, int | float | str) for item in value):
            kind = type(value[0]).__name__
            return f"{with_article(name)} of {format_count(len(value), kind)}"
        parts = [describe_value_shape(item) for item in _take_first_items(value)]
        return f"{with_article(name)} of {len(value)} ({', '.join(parts)})"
    return with_article(name)


def _take_first_items(items: Iterable[object]) -> list[Any]:
    return list(items)[:_MAX_LISTED]


_module = ""


class Displays(Protocol):
    """Functions of the display module."""

    def render_cell(self, value: Any, /) -> str:
        """Return HTML for a notebook cell."""

    def render_text(self, value: Any, /) -> str:
        """Return plain text for `print`."""

    def render_table(self, value: Any, /) -> Any:
        """Return an object that rich prints."""

    def save_page(self, value: Any, path: str | Path, /) -> None:
        """Write an HTML page to a file."""


def show_by(module: str) -> None:
    """Register the display module, imported on first use."""
    global _module
    _module = module


def load_displays() -> Displays:
    """Return the display module."""
    return cast(Displays, importlib.import_module(_module))


class Displayed:
    """A value displayed as HTML in notebooks."""

    def _repr_html_(self) -> str:
        return load_displays().render_cell(self)


class Printed(Displayed):
    """A value displayed as HTML in notebooks, and printed as a table."""

    def __str__(self) -> str:
        return load_displays().render_text(self)


def write_table(file: TextIO, rows: Iterable[Sequence[object]], delimiter: str = ",") -> None:
    """Write rows to a file; a text that looks like a formula starts with an apostrophe.

    Numbers are never changed, negative ones included.
    """
    writers = {
        quoting: csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=quoting)
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
    }
    for row in rows:
        cells = [
            f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell
            for cell in row
        ]
        is_ambiguous = any(isinstance(c, str) and _HIDDEN_FORMULA.search(c) for c in cells)
        writers[csv.QUOTE_NONNUMERIC if is_ambiguous else csv.QUOTE_MINIMAL].writerow(cells)
