"""Tables of figures, for a terminal and for a page; the first columns are words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

#: Columns of words, on the left.
WORDS = 3


def shown(value: float | None, form: str) -> str:
    """A figure in a format; nothing where it is not known."""
    return "" if value is None else format(value, form)


def make_table(title: str, *headings: str, words: int = 1) -> Table:
    """For a terminal: columns of words, so many, then columns of figures."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right")
    return table


def sectioned_table(
    title: str, headings: Sequence[str], lines: Iterable[tuple[object, list[str]]]
) -> Table:
    """For a terminal: a line between those of one section, which comes first in each pair."""
    table, previous = make_table(title, *headings, words=WORDS), None
    for section, cells in lines:
        if previous not in (None, section):
            table.add_section()
        previous = section
        table.add_row(*cells)
    return table


def markdown_table(headings: Sequence[str], lines: Iterable[list[str]]) -> str:
    """For a page."""
    rules = ["---" if index < WORDS else "---:" for index in range(len(headings))]
    rows = [list(headings), rules, *lines]
    return "".join("| " + " | ".join(cells).replace("\n", " ") + " |\n" for cells in rows)
