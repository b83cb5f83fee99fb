"""Bars, and points on lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, cos, floor, log10, pi, sin

from neural_mp.core.precision import Precision
from neural_mp.util.html import Child, Element, element


def card(title: str, lead: Child, *content: Child, kind: str = "") -> Element:
    """A section with a heading and a sentence below it."""
    said = element("p", lead, class_="lead") if lead else None
    return element("section", element("h2", title), said, content, class_=f"card {kind}".rstrip())


def none(words: str) -> Element:
    """What stands where there is nothing to show."""
    return element("p", words, class_="none")


def facts(pairs: Iterable[tuple[str, Child]]) -> Element:
    """Names and what they are."""
    return element(
        "dl", [[element("dt", name), element("dd", value)] for name, value in pairs], class_="facts"
    )


def scrolling(content: Element, what: str, kind: str = "") -> Element:
    """What is wider or longer than the page lets it be; keys scroll it, too."""
    return element(
        "div",
        content,
        class_=f"scroll {kind}".rstrip(),
        tabindex=0,
        role="region",
        aria_label=what,
    )


def name(text: str) -> Element:
    """The name of an op or a tensor."""
    return element("code", text)


def joined(parts: Iterable[str]) -> str:
    """Words with a dot between them, empty ones left out."""
    return " · ".join(part for part in parts if part)


#: Charts of less width than this are for half of the page.
_FULL_WIDTH = 1000
#: How people write precisions.
NAMES = {Precision.INT8: "INT8", Precision.BF16: "BF16", Precision.FP16: "FP16"}
NAMES |= {Precision.FP32: "FP32"}


@dataclass(frozen=True)
class Scale:
    """Values on a line of a picture.

    Attributes:
        low, high: the values at its ends.
        start, end: where these lie, in the picture's units.
        logarithmic: whether equal ratios are equally long.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Where a value lies; one beyond an end lies at the end."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, wanted: int = 5) -> list[float]:
        """Round values along the line, about as many as wanted."""
        if self.logarithmic:
            first, last = round(log10(self.low)), round(log10(self.high))
            step = max(1, ceil((last - first) / wanted))
            return [10.0**exponent for exponent in range(first, last + 1, step)]
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / wanted
        power = 10 ** floor(log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = ceil(self.low / step - 1e-9)
        count = floor(self.high / step + 1e-9) - first + 1
        return [round((first + index) * step, 12) for index in range(count)]


def percent(value: float) -> str:
    """A share as people read it."""
    if value >= 0.1 or value <= 0:
        return f"{value:.0%}"
    digits = max(1 - floor(log10(value * 100)), 0)
    shown = f"{value * 100:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} %"


def both(make: Callable[[bool], Element]) -> list[Element]:
    """A chart drawn twice, for wide and for narrow screens: scaled down, its words are too small.

    Args:
        make: draws it; told whether the screen is narrow.
    """
    return [
        element("div", make(False), class_="wide"),
        element("div", make(True), class_="narrow"),
    ]


def picture(width: float, height: float, said: str, *children: Child) -> Element:
    """An SVG that fills the width there is.

    Args:
        width: in its own units.
        height: the same.
        said: what it shows, for those who cannot see it.
        children: its elements.
    """
    return element(
        "svg",
        element("title", said),
        children,
        viewBox=f"0 0 {width:g} {height:g}",
        class_=f"chart {_size(width)}".rstrip(),
        role="group",
        aria_label=said,
    )


def _size(width: float) -> str:
    """The class of charts that are not to fill the whole page, where they stand alone."""
    return "half" if width < _FULL_WIDTH else ""


def text(words: str, x: float, y: float, kind: str, anchor: str = "start") -> Element:
    """A line of text in a picture."""
    return element("text", words, x=x, y=y, class_=kind, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def mark(shape: str, x: float, y: float, kind: str, radius: float = 6) -> Element:
    """A point of a chart: `circle`, `cross`, `diamond`, `triangle` or `star`."""
    if shape == "circle":
        return element("circle", cx=x, cy=y, r=radius, class_=kind)
    if shape == "cross":
        r = radius - 1
        path = f"M{x - r:g},{y - r:g}L{x + r:g},{y + r:g}M{x + r:g},{y - r:g}L{x - r:g},{y + r:g}"
        return element("path", d=path, class_=kind)
    corners, radii = {"diamond": (4, (1.1,)), "triangle": (3, (1.1,))}.get(
        shape, (10, (1.75, 0.75))
    )
    points = []
    for corner in range(corners):
        angle, reach = 2 * pi * corner / corners, radius * radii[corner % len(radii)]
        points.append(f"{x + reach * sin(angle):.1f},{y - reach * cos(angle):.1f}")
    return element("path", d=f"M{'L'.join(points)}Z", class_=kind)


def legend(entries: list[tuple[str, str]]) -> Element:
    """What the colours of a chart mean: class of a swatch and words."""
    return element(
        "ul",
        [element("li", element("i", class_=f"swatch {kind}"), words) for kind, words in entries],
        class_="legend",
    )


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
