"""Samples of output in the documentation of the command line."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def sample_of(command: str) -> str:
    """Return the output of a command in the page."""
    (output,) = re.findall(
        rf"\n\$ neural-mp {re.escape(command)}\n(.*?)```", _PAGE.read_text("utf-8"), re.DOTALL
    )
    return str(output)


def cells(text: str, count: int = 2) -> list[tuple[str, ...]]:
    """Return the first cells of every row of the tables."""
    rows = (re.split("[│┃]", line) for line in text.splitlines())
    return [
        tuple(cell.strip() for cell in row[1 : count + 1])
        for row in rows
        if len(row) > count and row[1].strip()
    ]


def headings(text: str) -> list[list[str]]:
    """Return the headings of the tables."""
    return [
        [cell.strip() for cell in line.split("┃")[1:-1]]
        for line in text.splitlines()
        if line.startswith("┃")
    ]


def lines_outside(text: str) -> list[str]:
    """Return the lines that belong to no table."""
    return [line.rstrip() for line in text.splitlines() if line[:1] not in "┏┃┡│├└"]
