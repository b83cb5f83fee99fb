"""Tables of executed kernels."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from neural_mp.profiling import KernelChange, KernelKey, KernelLog, RowPair
from neural_mp.reporting import formatting
from neural_mp.util.text import counted

_HEADINGS = {
    KernelKey.IMPLEMENTATION: "jit kernel",
    KernelKey.PRIMITIVE: "primitive",
    KernelKey.ISA: "instructions",
    KernelKey.PRECISION: "precision",
    KernelKey.PROBLEM: "problem",
}


def kernel_table(log: KernelLog, key: str = KernelKey.IMPLEMENTATION) -> RenderableType:
    """Return a table of the time per kernel: calls, total time, fraction.

    Raises:
        ConfigurationError: the key is unknown; see `KernelLog.by`.
    """
    figures = ("calls", "elapsed time", "share")
    table = formatting.table(summary(log), _HEADINGS[KernelKey(key)], *figures, right=figures)
    for row in log.by(key):
        table.add_row(
            row.name, str(row.calls), _format_milliseconds(row.milliseconds), f"{row.share:.1%}"
        )
    table.add_section()
    table.add_row(
        "all", str(len(log.calls)), _format_milliseconds(log.total), "100.0%" if log.total else "–"
    )
    return Group(table, *(Text(note, style="yellow") for note in log.notes))


def kernel_pairs_table(pairs: Sequence[RowPair], key: str, logs: Sequence[KernelLog]) -> Table:
    """Return a table that compares two logs by the rows that `side_by_side` paired by `key`."""
    figures = ("calls", "calls after", "time", "time after", "speed")
    heading = _HEADINGS[KernelKey(key)]
    table = formatting.table("Comparison of both logs", heading, *figures, right=figures)
    for pair in pairs:
        rows = pair.before, pair.after
        counts = [str(row.calls) if row else "–" for row in rows]
        times = [row.milliseconds if row else None for row in rows]
        # Different numbers of calls mean different work, so a speedup is undefined.
        speed = _format_speedup(*times) if counts[0] == counts[1] else "–"
        table.add_row(pair.name, *counts, *map(_format_milliseconds, times), speed)
    table.add_section()
    totals = [log.total for log in logs]
    table.add_row(
        "all",
        *(str(len(log.calls)) for log in logs),
        *map(_format_milliseconds, totals),
        _format_speedup(*totals),
    )
    return table


def kernel_changes_table(changes: Sequence[KernelChange]) -> RenderableType:
    """Return a table of the work that other kernels compute in the second log."""
    if not changes:
        return Text("no changed kernels: both logs use the same kernels for the same work")
    figures = ("sizes", "time", "time after", "speed")
    headings = ("work", "kernels → kernels after", *figures)
    table = formatting.table("Changed kernels", *headings, right=figures)
    for change in changes:
        counts = change.calls_before, change.calls_after
        durations = change.milliseconds_before, change.milliseconds_after
        times = [time if count else None for time, count in zip(durations, counts, strict=True)]
        kernels = (f"→ {name}" for name in change.after or ("–",))
        table.add_row(
            change.work,
            "\n".join((*(change.before or ("–",)), *kernels)),
            str(change.problems),
            *map(_format_milliseconds, times),
            _format_speedup(*times) if counts[0] == counts[1] else "–",
        )
    return table


def summary(log: KernelLog) -> str:
    """Summarize a log in one line: calls, time, library, instruction set."""
    calls = f"{counted(len(log.calls), 'kernel call')}, {_format_milliseconds(log.total)}"
    return "; ".join(part for part in (calls, log.library.split(" (")[0], log.isa) if part)


def _format_milliseconds(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds:,.3f} ms"


def _format_speedup(previous: float | None, current: float | None) -> str:
    return formatting.times(previous / current if previous and current else None)
