"""Figures as people read them."""

from __future__ import annotations

from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report


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


def share(value: float | None) -> str:
    """A share in per cent, of the smallest its power of ten; a dash where there is none."""
    if value is None:
        return "–"
    percent = value * 100
    return f"{percent:.2g} %" if percent == 0 or 1e-3 <= percent < 100 else f"{percent:.0e} %"


def number(value: float | None) -> str:
    """A metric's value; a dash where there is none."""
    return "–" if value is None else f"{value:.5g}"


def accuracy(trial: Trial) -> str:
    """The accuracy of a trial; of several metrics each."""
    if not trial.metrics:
        return f"accuracy {number(trial.accuracy)}"
    return ", ".join(f"{name} {number(value)}" for name, value in trial.metrics.items())


def times(value: float | None) -> str:
    """A ratio; a dash where there is none."""
    return "–" if value is None else f"{value:.2f}×"


def speed(report: Report) -> str:
    """How fast the result is beside FP32, with the spread; a dash where that was not measured."""
    if report.speedup is None:
        return "–"
    low, high = report.speedup_low, report.speedup_high
    if low is None or high is None:
        return f"{times(report.speedup)} as fast"
    emulated = f", {' and '.join(report.emulated)} emulated" if report.emulated else ""
    spread = f"({low:.2f} to {high:.2f}){emulated}"
    return (
        f"no difference {spread}"
        if low <= 1 <= high
        else f"{times(report.speedup)} as fast {spread}"
    )
