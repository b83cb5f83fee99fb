"""Tables of very many rows, with the layout of rich in a fraction of its time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from rich.box import HEAVY_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from neural_mp.errors import visible
from neural_mp.reporting.formatting import TitledTable


class LongTable:
    """Table of plain texts, with its title above.

    Rich lays out every cell of a `Table` on its own, half a millisecond per row. Here it lays out
    the longest cells of each column, and the rows follow in the same columns.

    Args:
        heading: the title.
        columns: heading → maximum width, None for any.
        rows: the texts of a row, and the style of the row.
    """

    def __init__(
        self,
        heading: str,
        columns: dict[str, int | None],
        rows: Sequence[tuple[Sequence[str], str]],
    ) -> None:
        self._heading, self._columns = heading, columns
        self._rows = [(tuple(map(visible, texts)), style) for texts, style in rows]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the full width."""
        return Measurement.get(console, options, self._longest)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the title and the table."""
        box = HEAVY_HEAD.substitute(options, safe=console.safe_box)
        widths = self._longest.measure_columns(console, options)
        separator = box.get_row(widths, "head")
        lines = console.render_lines(self._longest, options, pad=False)
        texts = ["".join(segment.text for segment in line) for line in lines]
        head = texts.index(separator) + 1
        for line in lines[:head]:
            yield from (*line, Segment.line())
        wrapped: dict[tuple[str, int], list[str]] = {}
        edges = box.mid_left, box.mid_vertical, box.mid_right
        for cells, style in self._rows:
            parts = [
                _wrap_cell(console, text, width - 2, wrapped)
                for text, width in zip(cells, widths, strict=True)
            ]
            yield from _render_row(parts, widths, edges, console, style)
        yield from (*lines[-1], Segment.line())

    @cached_property
    def _longest(self) -> _Columns:
        """The table of the cells that decide on the width of each column."""
        table = _Columns(self._heading)
        cells = []
        for index, (heading, width) in enumerate(self._columns.items()):
            table.add_column(heading, overflow="fold", max_width=width)
            texts = {texts[index] for texts, _ in self._rows} or {""}
            longest_line = max(texts, key=lambda text: max(map(cell_len, text.split("\n"))))
            longest_word = max(texts, key=lambda text: max(map(cell_len, text.split()), default=0))
            cells.append((longest_line, longest_word))
        for row in zip(*cells, strict=True):
            table.add_row(*row)
        return table


class _Columns(TitledTable):
    def measure_columns(self, console: Console, options: ConsoleOptions) -> list[int]:
        """Return the width of each column with its padding."""
        within = options.update_width(options.max_width - self._extra_width)
        return self._calculate_column_widths(console, within)


def _wrap_cell(
    console: Console, text: str, width: int, wrapped: dict[tuple[str, int], list[str]]
) -> list[str]:
    """Return the lines of a cell, padded to the width of its column; `wrapped` caches them."""
    key = text, width
    if key not in wrapped:
        lines = [text]
        if "\n" in text or cell_len(text) > width:
            lines = [line.plain for line in Text(text).wrap(console, width, overflow="fold")]
        wrapped[key] = [f" {line}{' ' * (width - cell_len(line))} " for line in lines]
    return wrapped[key]


def _render_row(
    cells: Sequence[list[str]],
    widths: Sequence[int],
    edges: tuple[str, str, str],
    console: Console,
    style: str,
) -> Iterator[Segment]:
    left, between, right = edges
    for index in range(max(map(len, cells))):
        line = [
            cell[index] if index < len(cell) else " " * width
            for cell, width in zip(cells, widths, strict=True)
        ]
        if not style:
            yield from (Segment(f"{left}{between.join(line)}{right}"), Segment.line())
            continue
        yield Segment(left)
        for position, text in enumerate(line):
            yield Segment(text, console.get_style(style))
            yield Segment(between if position < len(line) - 1 else right)
        yield Segment.line()
