"""The table of `install.md` that lists what was run, from the results of `.ci/versions`.

`python docs/tested_versions.py` adds the rows of `build/versions/results.tsv` to the page; a newer
result replaces that of the same tests with the same choice of versions and the same Python.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import dropwhile, takewhile
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "install.md"
RESULTS = DOCS.parent / "build" / "versions" / "results.tsv"
#: Columns of the table, and of a line of results.
COLUMNS = ("tests", "versions", "Python", "packages", "outcome", "date")
_HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}\n"
_NUM_KEYS = 3

Row = tuple[str, ...]


def read_page_rows(page: str) -> list[Row]:
    """Return the rows of the table in the text of the page, without the header."""
    lines = page.partition(_HEADER)[2].splitlines()
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [tuple(line.strip("| ").split(" | ")) for line in rows]


def read_results(text: str) -> list[Row]:
    """Return the rows in tab-separated lines, in their order.

    Raises:
        ValueError: a line has another number of columns.
    """
    rows = [tuple(line.split("\t")) for line in text.splitlines()]
    for row in rows:
        if len(row) != len(COLUMNS):
            raise ValueError(f"a result must have the columns {', '.join(COLUMNS)}, got {row}")
    return rows


def write_table(page: str, added: Iterable[Row] = ()) -> str:
    """Return the text of the page with the rows of its table and those added, sorted."""
    rows = {row[:_NUM_KEYS]: row for row in (*read_page_rows(page), *added)}
    ordered = sorted(rows.values(), key=lambda row: (row[0], row[1], _version(row[2])))
    table = _HEADER + "\n".join(f"| {' | '.join(row)} |" for row in ordered)
    before, _, rest = page.partition(_HEADER)
    after = "".join(dropwhile(lambda line: line.startswith("|"), rest.splitlines(keepends=True)))
    return f"{before}{table}\n{after}"


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


if __name__ == "__main__":
    results = read_results(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(write_table(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
