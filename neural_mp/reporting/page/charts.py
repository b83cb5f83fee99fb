"""Parts of a page: cards, shortened names, and SVG charts of bars, and points on lines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, cos, floor, log10, pi, sin

from neural_mp.core.precision import Precision
from neural_mp.util.html import Child, Element, create_element


def draw_card(title: str, lead: Child, *content: Child, kind: str = "") -> Element:
    """Return a section with a heading and an introduction."""
    intro = create_element("p", lead, class_="lead") if lead else None
    return create_element(
        "section", create_element("h2", title), intro, content, class_=f"card {kind}".rstrip()
    )


def draw_empty_note(message: str) -> Element:
    """Return a placeholder for missing content."""
    return create_element("p", message, class_="none")


def draw_facts(pairs: Iterable[tuple[str, Child]]) -> Element:
    """Return a list of names and values."""
    return create_element(
        "dl", [[create_element("dt", n), create_element("dd", v)] for n, v in pairs], class_="facts"
    )


def draw_scroll_area(content: Element, what: str, kind: str = "") -> Element:
    """Return a scrollable area that also accepts keyboard input."""
    return create_element(
        "div", content, class_=f"scroll {kind}".rstrip(), tabindex=0, role="region", aria_label=what
    )


def draw_name(text: str) -> Element:
    """Return the name of an op or a tensor as an element."""
    return create_element("code", text)


#: Narrower charts fill half of the page.
_FULL_WIDTH = 1000
#: Display names of precisions.
NAMES = {precision: precision.value.upper() for precision in Precision}


@dataclass(frozen=True)
class Scale:
    """Linear or logarithmic axis of a chart.

    Attributes:
        low, high: values at the ends.
        start, end: positions of the ends in SVG units.
        logarithmic: whether the axis is logarithmic.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        """Return the position of a value, clipped to the ends."""
        low, high, value = self.low, self.high, min(max(value, self.low), self.high)
        if self.logarithmic:
            low, high, value = log10(low), log10(high), log10(value)
        fraction = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + fraction * (self.end - self.start), 1)

    def round_ticks(self, number: int = 5) -> list[float]:
        """Return about `number` round values along the axis."""
        if self.logarithmic:
            first, last = round(log10(self.low)), round(log10(self.high))
            step = max(1, ceil((last - first) / number))
            return [10.0**exponent for exponent in range(first, last + 1, step)]
        if self.high <= self.low:
            return [self.low]
        rough = (self.high - self.low) / number
        power = 10 ** floor(log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = ceil(self.low / step - 1e-9)
        count = floor(self.high / step + 1e-9) - first + 1
        return [round((first + index) * step, 12) for index in range(count)]


def format_percent(value: float) -> str:
    """Format a fraction as a percentage."""
    if value >= 0.1 or value <= 0:
        return f"{value:.0%}"
    digits = max(1 - floor(log10(value * 100)), 0)
    shown = f"{value * 100:.{digits}f}"
    return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} %"


def draw_for_screens(make: Callable[[bool], Element]) -> list[Element]:
    """Draw a chart for wide and for narrow screens, since scaled-down text is illegible."""
    wide = create_element("div", make(False), class_="wide")
    return [wide, create_element("div", make(True), class_="narrow")]


def draw_picture(width: float, height: float, label: str, *children: Child) -> Element:
    """Return an SVG that fills the available width; `label` is its text for screen readers."""
    return create_element(
        "svg",
        create_element("title", label),
        children,
        viewBox=f"0 0 {width:g} {height:g}",
        class_="chart half" if width < _FULL_WIDTH else "chart",
        role="group",
        aria_label=label,
    )


def draw_text(content: str, x: float, y: float, kind: str, anchor: str = "start") -> Element:
    """Return a line of text."""
    return create_element("text", content, x=x, y=y, class_=kind, text_anchor=anchor)


def draw_line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Element:
    """Return a straight line."""
    return create_element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def draw_mark(shape: str, x: float, y: float, kind: str, radius: float = 6) -> Element:
    """Return a point marker: `circle`, `cross`, `diamond`, `triangle` or `star`."""
    if shape == "circle":
        return create_element("circle", cx=x, cy=y, r=radius, class_=kind)
    if shape == "cross":
        r = radius - 1
        path = f"M{x - r:g},{y - r:g}L{x + r:g},{y + r:g}M{x + r:g},{y - r:g}L{x - r:g},{y + r:g}"
        return create_element("path", d=path, class_=kind)
    corners, radii = {"diamond": (4, (1.1,)), "triangle": (3, (1.1,))}.get(
        shape, (10, (1.75, 0.75))
    )
    points = []
    for corner in range(corners):
        angle, reach = 2 * pi * corner / corners, radius * radii[corner % len(radii)]
        points.append(f"{x + reach * sin(angle):.1f},{y - reach * cos(angle):.1f}")
    return create_element("path", d=f"M{'L'.join(points)}Z", class_=kind)


def with_tooltip(tooltip: str, *drawn: Child, **attributes: object) -> Element:
    """Return a group of shapes with a tooltip."""
    return create_element("g", drawn, create_element("title", tooltip), **attributes)


def time_grid(scale: Scale, number: int, top: float, foot: float, label: float) -> list[Element]:
    """Return at most `number` vertical grid lines with their fractions at the height `label`."""
    drawn = []
    for value, caption in _choose_spaced_ticks(scale, number):
        x = scale(value)
        drawn.append(draw_line(x, top, x, foot, "grid"))
        drawn.append(draw_text(caption, x, label, "tick", "middle"))
    return drawn


def _choose_spaced_ticks(scale: Scale, number: int) -> list[tuple[float, str]]:
    """Return as many ticks, up to `number`, as leave room between their labels."""
    for count in range(number, 0, -1):
        ticks = [
            (v, format_percent(v) if scale.logarithmic else f"{v:.0%}")
            for v in scale.round_ticks(count)
        ]
        if all(
            scale(next_value) - scale(value) > _TICK_LETTER * (len(label) + len(following)) / 2 + 8
            for (value, label), (next_value, following) in pairwise(ticks)
        ):
            return ticks
    return ticks[:1]


def draw_legend(entries: list[tuple[str, str]]) -> Element:
    """Return a legend from pairs of swatch class and text."""
    return create_element(
        "ul",
        [
            create_element("li", create_element("i", class_=f"swatch {kind}"), label)
            for kind, label in entries
        ],
        class_="legend",
    )


#: Lower bound of logarithmic axes.
_LEAST = 1e-7
_BAR = 8
_ROW = 21
#: Character width of names, of labels in bars, and of labels of axes.
_LETTER, _WORD_LETTER, _TICK_LETTER = 6.9, 7.2, 7.4


@dataclass(frozen=True)
class Part:
    """Bar, segment of a bar, or point.

    Attributes:
        value: length or position.
        kind: CSS classes.
        tooltip: text of the tooltip.
        label: text inside the bar, if it fits.
        shape: marker of a point.
    """

    value: float
    kind: str
    tooltip: str
    label: str = ""
    shape: str = "circle"


@dataclass(frozen=True)
class Row:
    """Row of bars or points.

    Attributes:
        name: row name.
        parts: bars or points.
        note: text after the bars or points.
        linked: number of leading points joined by a line.
    """

    name: str
    parts: Sequence[Part]
    note: str = ""
    linked: int = 0


def draw_stacked_bar(parts: Sequence[Part], narrow: bool, whole: float | None = None) -> Element:
    """Draw a stacked bar of the width `whole`, by default the sum of the parts."""
    width, height = (340 if narrow else 560), 26
    total = whole or sum(part.value for part in parts) or 1.0
    drawn: list[Child] = []
    x = 0.0
    for part in parts:
        wide = part.value / total * width
        labelled = wide > _WORD_LETTER * len(part.label) + 10
        rect = create_element(
            "rect", x=round(x, 1), y=0, width=max(wide - 1, 0.5), height=height, class_=part.kind
        )
        label = draw_text(part.label, round(x + 6, 1), height / 2 + 4, f"in-bar on-{part.kind}")
        drawn.append(with_tooltip(part.tooltip, rect, label if labelled else None))
        x += wide
    return draw_picture(width, height, "; ".join(part.tooltip for part in parts), drawn)


def draw_bars(rows: Sequence[Row], narrow: bool, limit: float | None = None) -> Element:
    """Draw rows of bars on a common scale from zero; longer bars are clipped at `limit`."""
    width, label = (350, 112) if narrow else (560, 190)
    most = limit or max(part.value for row in rows for part in row.parts)
    scale = Scale(0.0, most or 1.0, label, width - (50 if narrow else 66))
    high = _BAR * max(len(row.parts) for row in rows) + 9
    labels = _shorten_labels(rows, label)
    drawn: list[Child] = []
    for index, row in enumerate(rows):
        y = 4 + high * index
        drawn.append(_draw_label(row, labels, label, y + high / 2 + 2))
        for position, part in enumerate(row.parts):
            rect = create_element(
                "rect",
                x=label,
                y=y + 2 + _BAR * position,
                width=max(scale(min(part.value, most)) - label, 1.0),
                height=_BAR - 1,
                class_=part.kind,
            )
            clipped = part.value > most
            what = f"{part.tooltip}; the bar is clipped" if clipped else part.tooltip
            drawn.append(with_tooltip(what, rect))
        end = max(scale(min(part.value, most)) for part in row.parts)
        drawn.append(draw_text(row.note, end + 6, y + high / 2 + 2, "note"))
    return draw_picture(width, 8 + high * len(rows), _describe_rows(rows), drawn)


def draw_points(
    rows: Sequence[Row], narrow: bool, wide: bool = False, limit: float | None = None
) -> Element:
    """Draw rows of fractions as points on a logarithmic scale, with a mark at `limit`.

    A `wide` chart has the full width of the page.
    """
    width, label = (350, 112) if narrow else (1180, 300) if wide else (560, 190)
    values = [max(part.value, _LEAST) for row in rows for part in row.parts]
    first = floor(log10(min(values)))
    last = max(ceil(log10(max([*values, limit or 0.0]) * (1 - 1e-9))), first + 1)
    scale = Scale(10.0**first, 10.0**last, label + 6, width - (104 if narrow else 124), True)
    foot = 20 + _ROW * len(rows)
    drawn: list[Child] = [*time_grid(scale, 3 if narrow else 8 if wide else 4, 16, foot, 11)]
    if limit is not None:
        drawn.append(draw_line(scale(limit), 16, scale(limit), foot, "target"))
        drawn.append(
            draw_text(format_percent(limit), scale(limit), foot + 13, "target-word", "middle")
        )
    labels = _shorten_labels(rows, label)
    for index, row in enumerate(rows):
        y = 18 + _ROW * index + _ROW / 2
        drawn.append(_draw_label(row, labels, label, y + 4))
        drawn.extend(_draw_row_points(row, scale, y))
    return draw_picture(width, foot + 18, _describe_rows(rows), drawn)


def _draw_row_points(row: Row, scale: Scale, y: float) -> list[Child]:
    positions = [scale(max(part.value, _LEAST)) for part in row.parts]
    drawn: list[Child] = []
    if row.linked > 1:
        drawn.append(
            draw_line(min(positions[: row.linked]), y, max(positions[: row.linked]), y, "link")
        )
    for x, part in zip(positions, row.parts, strict=True):
        drawn.append(with_tooltip(part.tooltip, draw_mark(part.shape, x, y, part.kind, 5)))
    drawn.append(draw_text(row.note, max(positions) + 10, y + 4, "note"))
    return drawn


def draw_ranges(rows: Sequence[Row], narrow: bool, marked: float) -> Element:
    """Draw a value with its interval for each row of three parts: value, lower, upper bound."""
    width, label = (350, 74) if narrow else (560, 90)
    most = max([marked, *(part.value for row in rows for part in row.parts)])
    scale = Scale(0.0, most * 1.02, label, width - (120 if narrow else 130))
    foot = 20 + _ROW * len(rows)
    drawn: list[Child] = [*time_grid(scale, 4, 16, foot, 11)]
    drawn.append(draw_line(scale(marked), 16, scale(marked), foot, "base"))
    labels = _shorten_labels(rows, label)
    for index, row in enumerate(rows):
        y = 18 + _ROW * index + _ROW / 2
        middle, low, high = (scale(part.value) for part in row.parts)
        first = row.parts[0]
        drawn.append(_draw_label(row, labels, label, y + 4))
        drawn.append(draw_line(low, y, high, y, "spread"))
        drawn.append(with_tooltip(first.tooltip, draw_mark(first.shape, middle, y, first.kind, 5)))
        drawn.append(draw_text(row.note, high + 10, y + 4, "note"))
    return draw_picture(width, foot + 6, _describe_rows(rows), drawn)


def _shorten_labels(rows: Sequence[Row], label: float) -> dict[str, str]:
    return shorten_names((row.name for row in rows), int(label / _LETTER))


def _draw_label(row: Row, labels: dict[str, str], label: float, y: float) -> Element:
    caption = draw_text(labels[row.name], label - 8, y, "name", "end")
    caption.append(create_element("title", row.name))
    return caption


def _describe_rows(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row.name}: {row.note or row.parts[0].tooltip}" for row in rows[:8])


_DOTS = "…"


def shorten_names(names: Iterable[str], room: int) -> dict[str, str]:
    """Return name → label of at most `room` characters; the labels of different names differ.

    A label keeps the end of its name. Names with the same end also keep as much of the start as
    distinguishes them, or else the part in which they differ, before the end if there is room.

    Raises:
        ValueError: the room is below 8 characters.
    """
    if room < 8:
        raise ValueError(f"the room must be at least 8 characters, got {room}")
    groups: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        groups[_elide_middle(name, 0, room)].append(name)
    result: dict[str, str] = {}
    for label, group in groups.items():
        labels = [label] if len(group) == 1 else _make_distinct_labels(group, room)
        result.update(zip(group, labels, strict=True))
    return _number_duplicates(result, room)


def _make_distinct_labels(group: Sequence[str], room: int) -> list[str]:
    """Return labels for names with the same end."""
    for head in range(1, room - 3):
        labels = [_elide_middle(name, head, room) for name in group]
        if len(set(labels)) == len(group):
            return labels
    start = _find_first_difference(group)
    for width in range(1, room - 5):
        parts = (f"{_DOTS}{name[start:][:width]}{_DOTS}" for name in group)
        labels = [part + name[len(part) - room :] for part, name in zip(parts, group, strict=True)]
        if len(set(labels)) == len(group):
            return labels
    return [f"{_DOTS}{name[start:][: room - 2]}{_DOTS}" for name in group]


def _find_first_difference(group: Sequence[str]) -> int:
    """Return the start of the first word or number in which names differ."""
    columns = enumerate(zip(*group, strict=False))
    different = (at for at, letters in columns if len(set(letters)) > 1)
    start = next(different, min(map(len, group)))
    while start and group[0][start - 1].isalnum():
        start -= 1
    return start


def _elide_middle(name: str, head: int, room: int) -> str:
    return name if len(name) <= room else f"{name[:head]}{_DOTS}{name[head + 1 - room :]}"


def _number_duplicates(labels: dict[str, str], room: int) -> dict[str, str]:
    counts: dict[str, int] = defaultdict(int)
    used = set(labels.values())
    numbered = {}
    for name, label in labels.items():
        counts[label] += 1
        while counts[label] > 1 and (candidate := f"{label[: room - 5]}~{counts[label]}") in used:
            counts[label] += 1
        numbered[name] = label if counts[label] == 1 else candidate
        used.add(numbered[name])
    return numbered
