"""Scales, ticks and marks of charts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, cos, floor, log10, pi, sin

from neural_mp.core.precision import Precision
from neural_mp.util.html import Child, Element, element

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
