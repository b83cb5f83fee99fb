"""Formats of numbers and tables for readers."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from decimal import Decimal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report
from neural_mp.util.text import format_count

#: Percentages below this are not told apart.
_LEAST_PERCENT = 1e-6


def format_seconds(value: float | None) -> str:
    """Format a duration with a suitable unit; a dash for None."""
    if value is None:
        return "–"
    rounded = float(f"{value:.3g}")  # first, since 999.7 ns are 1 µs, not 1e+03 ns
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(rounded) >= scale:
            shown = rounded / scale
            return f"{shown:.0f} {unit}" if abs(shown) >= 1000 else f"{shown:.3g} {unit}"
    return f"{rounded / 1e-9:.3g} ns" if rounded else "0 s"


def format_effort_suffix(report: Report) -> str:
    """Return the end of a sentence, the limit that the effort set to a run; empty without one."""
    if report.effort_seconds is None:
        return ""
    return f"; by the effort, at most {format_seconds(report.effort_seconds)} after calibration"


def format_size(value: float | None) -> str:
    """Format a number of bytes with a suitable unit; a dash for None."""
    if value is None:
        return "–"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def format_fraction(value: float | None) -> str:
    """Format a fraction in percent, without an exponent; a dash for None."""
    if value is None:
        return "–"
    percent = value * 100
    if not math.isfinite(percent) or abs(percent) >= 100:
        return f"{percent:.0f} %"
    if 0 < abs(percent) < _LEAST_PERCENT:
        return f"<{_LEAST_PERCENT:.6f} %"
    digits = 2 if abs(percent) >= 1e-3 else 1
    return f"{Decimal(f'{percent:.{digits}g}'):f} %"


def format_number(value: float | None) -> str:
    """Format a metric value; a dash for None."""
    return "–" if value is None else f"{value:.5g}"


def format_accuracy(trial: Trial, metric: str = "") -> str:
    """Format the accuracy of a trial under the name of its metric, or each of several metrics."""
    if not trial.metrics:
        return f"{metric or 'accuracy'} {format_number(trial.accuracy)}"
    return ", ".join(f"{name} {format_number(value)}" for name, value in trial.metrics.items())


def time_of(report: Report) -> tuple[str, str, str]:
    """Return the name of the measured time, and the figures of FP32 and of the result.

    Samples per second if the throughput was measured, else seconds per batch. For an accelerator,
    the estimated cost instead.
    """
    if report.accelerator is not None:
        cost = report.accelerator.relative_cost
        return f"estimated cost, {report.accelerator.title}", "1", f"{cost:.3g}"
    batch = f", batch of {report.batch_size}" if report.batch_size else ""
    if report.streams is None:
        return (
            f"latency{batch}",
            format_seconds(report.baseline_latency),
            format_seconds(report.latency),
        )
    name = f"throughput{batch}, {format_count(report.streams, 'stream')}"
    baseline, result = report.baseline_throughput, report.throughput
    return name, _format_per_second(baseline), _format_per_second(result)


def _format_per_second(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g} samples/s"


def format_ratio(value: float | None) -> str:
    """Format a ratio; a dash for None."""
    return "–" if value is None else f"{value:.2f}×"


def format_speedup(report: Report) -> str:
    """Format the speedup over FP32 with its confidence interval; a dash if not measured.

    For an accelerator, the widths of its multiplications.
    """
    if report.accelerator is not None:
        return report.accelerator.words
    if report.speedup is None:
        return "–"
    low, high = report.speedup_low, report.speedup_high
    if low is None or high is None:
        return f"{format_ratio(report.speedup)} as fast"
    emulated = f", {' and '.join(report.emulated)} emulated" if report.emulated else ""
    spread = f"({low:.2f} to {high:.2f}){emulated}"
    return (
        f"no difference {spread}"
        if low <= 1 <= high
        else f"{format_ratio(report.speedup)} as fast {spread}"
    )


class TitledTable(Table):
    """Table with a title that may be wider than the table; a title of `Table` would be wrapped."""

    def __init__(self, heading: str) -> None:
        super().__init__()
        self.heading = heading

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the title and the table."""
        if self.heading:
            yield Text(self.heading, style="table.title")
        yield from super().__rich_console__(console, options)


def create_table(
    title: str,
    *headings: str,
    right: Collection[str] = (),
    rows: Iterable[Iterable[RenderableType]] = (),
) -> Table:
    """Return a table; columns with a heading in `right` are aligned to the right."""
    result = TitledTable(title)
    for heading in headings:
        result.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def format_decibels(sqnr: float) -> str:
    """Return an SQNR as text."""
    return "equal" if math.isinf(sqnr) else f"{sqnr:.1f} dB"
