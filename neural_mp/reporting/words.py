"""Figures as people read them."""

from __future__ import annotations


def seconds(value: float | None) -> str:
    """A duration with a fitting unit; a dash where there is none."""
    if value is None:
        return "–"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def size(value: float | None) -> str:
    """A number of bytes with a fitting unit; a dash where there is none."""
    if value is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def number(value: float | None) -> str:
    """A metric's value; a dash where there is none."""
    return "–" if value is None else f"{value:.5g}"


def times(value: float | None) -> str:
    """A ratio; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}×"
