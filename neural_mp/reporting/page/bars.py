"""Bars, and points on lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from neural_mp.reporting.page.axes import Scale, line, mark, percent, picture, text
from neural_mp.util.html import Child, Element, element

#: The least that a logarithmic scale shows.
_LEAST = 1e-7
_BAR = 8
_ROW = 21
#: Width of a letter of a name, and of the words in a bar.
_LETTER, _WORD_LETTER = 6.9, 7.2


@dataclass(frozen=True)
class Part:
    """A bar, a part of one, or a point.

    Attributes:
        value: how long it is, or where.
        kind: its classes.
        said: what it shows.
        label: words in it, where they fit.
        shape: of a point.
    """

    value: float
    kind: str
    said: str
    label: str = ""
    shape: str = "circle"


@dataclass(frozen=True)
class Row:
    """Bars or points of one thing.

    Attributes:
        name: of the thing.
        parts: its bars, or its points.
        note: words behind them.
        linked: how many of the points, from the first, a line joins.
    """

    name: str
    parts: Sequence[Part]
    note: str = ""
    linked: int = 0


def stacked(parts: Sequence[Part], narrow: bool, whole: float | None = None) -> Element:
    """One bar of parts side by side.

    Args:
        parts: from left to right.
        narrow: whether the screen is.
        whole: what the full width stands for; all parts by default.
    """
    width, height = (340 if narrow else 560), 26
    total = whole or sum(part.value for part in parts) or 1.0
    drawn: list[Child] = []
    x = 0.0
    for part in parts:
        wide = part.value / total * width
        fits = wide > _WORD_LETTER * len(part.label) + 10
        rect = element(
            "rect", x=round(x, 1), y=0, width=max(wide - 1, 0.5), height=height, class_=part.kind
        )
        label = text(part.label, round(x + 6, 1), height / 2 + 4, f"in-bar on-{part.kind}")
        drawn.append(element("g", rect, element("title", part.said), label if fits else None))
        x += wide
    return picture(width, height, "; ".join(part.said for part in parts), drawn)


def bars(rows: Sequence[Row], narrow: bool) -> Element:
    """Bars under each other, all on one scale from zero."""
    width, label = (350, 112) if narrow else (560, 190)
    most = max(part.value for row in rows for part in row.parts)
    scale = Scale(0.0, most or 1.0, label, width - (50 if narrow else 66))
    high = _BAR * max(len(row.parts) for row in rows) + 9
    drawn: list[Child] = []
    for index, row in enumerate(rows):
        y = 4 + high * index
        drawn.append(_name(row.name, label, y + high / 2 + 2))
        for place, part in enumerate(row.parts):
            rect = element(
                "rect",
                x=label,
                y=y + 2 + _BAR * place,
                width=max(scale(part.value) - label, 1.0),
                height=_BAR - 1,
                class_=part.kind,
            )
            drawn.append(element("g", rect, element("title", part.said)))
        end = max(scale(part.value) for part in row.parts)
        drawn.append(text(row.note, end + 6, y + high / 2 + 2, "note"))
    return picture(width, 8 + high * len(rows), _said(rows), drawn)


def points(
    rows: Sequence[Row], narrow: bool, wide: bool = False, limit: float | None = None
) -> Element:
    """Shares as points on a logarithmic scale.

    Args:
        rows: each with its points.
        narrow: whether the screen is.
        wide: whether the chart has the whole width of the page.
        limit: a share that is marked.
    """
    width, label = (350, 112) if narrow else (1180, 300) if wide else (560, 190)
    values = [max(part.value, _LEAST) for row in rows for part in row.parts]
    first = floor(log10(min(values)))
    last = max(ceil(log10(max([*values, limit or 0.0]) * (1 - 1e-9))), first + 1)
    scale = Scale(10.0**first, 10.0**last, label + 6, width - (104 if narrow else 124), True)
    foot = 20 + _ROW * len(rows)
    drawn: list[Child] = []
    for value in scale.ticks(3 if narrow else 8 if wide else 4):
        drawn.append(line(scale(value), 16, scale(value), foot, "grid"))
        drawn.append(text(percent(value), scale(value), 11, "tick", "middle"))
    if limit is not None:
        drawn.append(line(scale(limit), 16, scale(limit), foot, "target"))
        drawn.append(text(percent(limit), scale(limit), foot + 13, "target-word", "middle"))
    for index, row in enumerate(rows):
        drawn.extend(_points_of(row, scale, label, 18 + _ROW * index + _ROW / 2))
    return picture(width, foot + 18, _said(rows), drawn)


def _points_of(row: Row, scale: Scale, label: float, y: float) -> list[Child]:
    places = [scale(max(part.value, _LEAST)) for part in row.parts]
    drawn: list[Child] = [_name(row.name, label, y + 4)]
    if row.linked > 1:
        drawn.append(line(min(places[: row.linked]), y, max(places[: row.linked]), y, "link"))
    for x, part in zip(places, row.parts, strict=True):
        drawn.append(
            element("g", mark(part.shape, x, y, part.kind, 5), element("title", part.said))
        )
    drawn.append(text(row.note, max(places) + 10, y + 4, "note"))
    return drawn


def ranges(rows: Sequence[Row], narrow: bool, marked: float) -> Element:
    """A value with what lies below and above it for every row: three parts, the middle first.

    Args:
        rows: each with three parts: the value, the lower and the upper end.
        narrow: whether the screen is.
        marked: a value that is marked.
    """
    width, label = (350, 74) if narrow else (560, 90)
    most = max([marked, *(part.value for row in rows for part in row.parts)])
    scale = Scale(0.0, most * 1.02, label, width - (120 if narrow else 130))
    foot = 20 + _ROW * len(rows)
    drawn: list[Child] = []
    for value in scale.ticks(4):
        drawn.append(line(scale(value), 16, scale(value), foot, "grid"))
        drawn.append(text(f"{value:.0%}", scale(value), 11, "tick", "middle"))
    drawn.append(line(scale(marked), 16, scale(marked), foot, "base"))
    for index, row in enumerate(rows):
        y = 18 + _ROW * index + _ROW / 2
        middle, low, high = (scale(part.value) for part in row.parts)
        first = row.parts[0]
        drawn.append(_name(row.name, label, y + 4))
        drawn.append(line(low, y, high, y, "spread"))
        drawn.append(
            element("g", mark(first.shape, middle, y, first.kind, 5), element("title", first.said))
        )
        drawn.append(text(row.note, high + 10, y + 4, "note"))
    return picture(width, foot + 6, _said(rows), drawn)


def _name(name: str, label: float, y: float) -> Element:
    """A name that is cut at its front where there is no room."""
    room = int(label / _LETTER)
    short = name if len(name) <= room else f"…{name[1 - room :]}"
    made = text(short, label - 8, y, "name", "end")
    made.append(element("title", name))
    return made


def _said(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.name}: {row.note or row.parts[0].said}" for row in rows[:8])
