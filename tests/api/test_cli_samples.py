"""Samples of output in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def _cells(text: str) -> list[tuple[str, ...]]:
    """Return the first two cells of every row of the tables."""
    rows = (re.split("[│┃]", line) for line in text.splitlines())
    return [
        tuple(cell.strip() for cell in row[1:3]) for row in rows if len(row) > 2 and row[1].strip()
    ]


def test_the_sample_of_hardware_has_the_rows_of_its_output(run):
    """Support and reasons depend on the machine, rows and headings do not."""
    (sample,) = re.findall(r"\n\$ neural-mp hardware\n(.*?)```", PAGE.read_text(), re.DOTALL)
    expected, found = (
        [row for row in _cells(text) if row[0] in ("device", "cpu")]
        for text in (sample, run("hardware")[1])
    )
    assert len(expected) > 4
    assert found == expected
