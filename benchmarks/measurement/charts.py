"""Charts as SVG: points in a plane, and bars of several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 80, 24, 64, 84
#: Told apart by people who do not see all colours, too (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")
INK, LINES = "#333333", "#dddddd"


@dataclass(frozen=True)
class Point:
    """One mark: where it is, to which series it belongs, and whether it stands out."""

    x: float
    y: float
    series: str
    large: bool = False


@dataclass(frozen=True)
class Axis:
    """An axis: what it shows, where it begins and ends, and where it is marked."""

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    form: str = "g"

    def place(self, value: float, begin: float, end: float) -> float:
        """Where a value lies between two pixels."""
        return begin + (value - self.low) / (self.high - self.low) * (end - begin)


def scatter(
    title: str,
    note: str,
    x: Axis,
    y: Axis,
    points: Sequence[Point],
    lines: Mapping[str, float],
) -> str:
    """Points by series, with a dashed line at every `label → y` of `lines`."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [_frame(title, note, [*dict.fromkeys(point.series for point in points)])]
    for tick in x.ticks:
        at = x.place(tick, LEFT, right)
        parts.append(_line(at, TOP, at, bottom, LINES))
        parts.append(_text(at, bottom + 16, format(tick, x.form), "middle"))
    for tick in y.ticks:
        at = y.place(tick, bottom, TOP)
        parts.append(_line(LEFT, at, right, at, LINES))
        parts.append(_text(LEFT - 8, at + 4, format(tick, y.form), "end"))
    parts.append(_text((LEFT + right) / 2, bottom + 34, x.label, "middle"))
    parts.append(_text(LEFT, TOP - 10, y.label))
    for label, value in lines.items():
        at = y.place(value, bottom, TOP)
        parts.append(_line(LEFT, at, right, at, INK, dashed=True))
        parts.append(_text(right - 4, at - 5, label, "end"))
    colours = _colours(point.series for point in points)
    for point in points:
        at = x.place(point.x, LEFT, right), y.place(point.y, bottom, TOP)
        size = 9 if point.large else 5
        edge = f' stroke="{INK}" stroke-width="2"' if point.large else ""
        parts.append(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{size}" '
            f'fill="{colours[point.series]}" fill-opacity="0.8"{edge}/>'
        )
    return _document(parts)


def bars(title: str, note: str, label: str, rows: Mapping[str, Mapping[str, float]]) -> str:
    """One bar a row, made of its parts in order, with the sum at its end."""
    parts_of_all = [*dict.fromkeys(name for row in rows.values() for name in row)]
    colours = _colours(parts_of_all)
    longest = max(sum(row.values()) for row in rows.values())
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT - 60
    step = (bottom - TOP) / len(rows)
    parts = [_frame(title, note, parts_of_all)]
    for index, (name, row) in enumerate(rows.items()):
        top, at = TOP + (index + 0.2) * step, float(LEFT)
        parts.append(_text(LEFT - 8, top + step * 0.3 + 4, name, "end"))
        for part, value in row.items():
            wide = value / longest * (right - LEFT)
            parts.append(
                f'<rect x="{at:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{step * 0.6:.1f}" '
                f'fill="{colours[part]}"><title>{escape(part)}: {value:.1f}</title></rect>'
            )
            at += wide
        parts.append(_text(at + 8, top + step * 0.3 + 4, f"{sum(row.values()):.1f}"))
    parts.append(_text((LEFT + right) / 2, bottom + 16, label, "middle"))
    return _document(parts)


def _colours(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(dict.fromkeys(names), COLOURS, strict=False))


def _frame(title: str, note: str, series: Sequence[str]) -> str:
    """Background, title, legend and the note on where the figures are from."""
    parts = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        _text(LEFT, 26, title, size=16),
        _text(WIDTH - RIGHT, HEIGHT - 10, note, "end", size=11),
    ]
    at = LEFT
    for name, colour in _colours(series).items():
        parts.append(f'<circle cx="{at}" cy="{HEIGHT - 34}" r="5" fill="{colour}"/>')
        parts.append(_text(at + 10, HEIGHT - 30, name))
        at += 34 + 7 * len(name)
    return "\n".join(parts)


def _text(x: float, y: float, content: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{INK}">{escape(content)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashed: bool = False) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"{dashes}/>'
    )


def _document(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
