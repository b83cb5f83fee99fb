"""Tables as CSV, safe for spreadsheet programs: these run cells that look like formulas."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from typing import TextIO

#: Starts of formulas, and of whitespace before formulas, as listed by OWASP.
_FORMULA_STARTS = tuple("=+-@\t\r\n＝＋－＠")
#: A formula after a separator that a spreadsheet program may assume in place of the actual one, or
#: a break of the line.
_HIDDEN_FORMULA = re.compile(r"[,;\t|]\s*[=+\-@＝＋－＠]|[\r\n]")


def write_table(file: TextIO, rows: Iterable[Sequence[object]], delimiter: str = ",") -> None:
    """Write rows to a file; a text that looks like a formula starts with an apostrophe.

    Numbers are never changed, negative ones included.
    """
    writers = {
        quoting: csv.writer(file, delimiter=delimiter, lineterminator="\n", quoting=quoting)
        for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC)
    }
    for row in rows:
        cells = [_escape_cell(cell) for cell in row]
        is_ambiguous = any(isinstance(c, str) and _HIDDEN_FORMULA.search(c) for c in cells)
        writers[csv.QUOTE_NONNUMERIC if is_ambiguous else csv.QUOTE_MINIMAL].writerow(cells)


def _escape_cell(cell: object) -> object:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA_STARTS) else cell
