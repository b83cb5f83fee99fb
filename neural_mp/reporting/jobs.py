"""Progress and results of many jobs on a console."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from neural_mp.reporting import formatting
from neural_mp.reporting.console import NotebookLive, create_error_console, is_notebook
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus
from neural_mp.util.text import format_count
from neural_mp.util.verbosity import shows_progress

_STYLES = {JobStatus.MET: "green", JobStatus.MISSED: "yellow", JobStatus.FAILED: "red"}


class JobsListener:
    """Receiver of job events; every method may be overridden."""

    def began(self, count: int) -> None:
        """Handle the start of `count` jobs, finished ones included."""

    def report(self, job: str, message: str) -> None:
        """Handle a progress message of a job."""

    def ended(self, outcome: JobOutcome) -> None:
        """Handle the end of a job, or a job finished earlier."""

    def close(self) -> None:
        """Handle the end or interruption of all jobs."""


class LiveJobs(JobsListener):
    """Display with one line per running job, on a terminal or in a notebook cell.

    Elsewhere, it prints one line per event.

    Args:
        console: destination; default: the cell of a notebook, else standard error.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or create_error_console()
        self._running: dict[str, tuple[float, str]] = {}
        self._counts: dict[str, int] = {}
        self._whole = 0
        self._live: Live | None = None
        self._cell: NotebookLive | None = None
        self._ended: list[Text] = []
        if console is None and not shows_progress():
            return
        if console is None and is_notebook():
            self._cell = NotebookLive(self._render_jobs)
        elif self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render_jobs, console=self._console, transient=True
            )
            self._live.start()

    def began(self, count: int) -> None:
        """Store the number of jobs."""
        self._whole = count

    def report(self, job: str, message: str) -> None:
        """Show the state of the job."""
        since, _ = self._running.get(job, (time.monotonic(), ""))
        self._running[job] = since, message
        if self._cell is not None:
            self._cell.update()
        elif self._live is None:
            self._show_line(f"{job}: {message}")

    def ended(self, outcome: JobOutcome) -> None:
        """Print a line for the job."""
        self._running.pop(outcome.name, None)
        self._counts[outcome.status] = self._counts.get(outcome.status, 0) + 1
        self._show_line(
            f"{outcome.name}: {describe_outcome(outcome)}", _STYLES.get(outcome.status, "")
        )

    def close(self) -> None:
        """Remove the lines of running jobs."""
        if self._cell is not None:
            self._running.clear()
            self._cell.draw_content(self._render_jobs())
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show_line(self, text: str, style: str = "") -> None:
        if self._cell is not None:
            self._ended.append(Text(text, style))
            self._cell.draw_content(self._render_jobs())
            return
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _render_jobs(self) -> Group:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for job, (since, message) in self._running.items():
            table.add_row(Text(job), Text(f"{now - since:.0f} s", "dim"), Text(message))
        ended = sum(self._counts.values())
        counts = ", ".join(f"{count} {status}" for status, count in self._counts.items())
        return Group(
            *self._ended,
            table,
            Text(f"{ended} of {format_count(self._whole, 'job')} ended; {counts}"),
        )


def describe_outcome(job: JobOutcome) -> str:
    """Return the outcome of a job as one line of text."""
    if not job.status.has_result:
        return f"{'failed' if job.status is JobStatus.FAILED else 'not finished'}: {job.reason}"
    parts = [
        {
            JobStatus.MET: "met its target",
            JobStatus.MISSED: "did not meet its target",
            JobStatus.UNCHECKED: "accuracy not checked",
        }[job.status],
        f"{formatting.format_ratio(job.speedup)} as fast as the baseline" if job.speedup else "",
        ""
        if job.accuracy is None
        else f"{_get_metric_name(job)} {formatting.format_number(job.accuracy)}",
        "finished before" if job.known else "",
    ]
    return ", ".join(part for part in parts if part)


def build_jobs_table(outcomes: Sequence[JobOutcome]) -> Table:
    """Return a table of job outcomes, one row per job."""
    columns, named = list_figure_headings(outcomes), has_several_metrics(outcomes)
    table = formatting.create_table(
        count_by_status(outcomes), "job", "result", *columns, right=columns
    )
    for job in outcomes:
        reason = f": {job.reason}" if job.reason else ""
        table.add_row(
            Text(job.name),
            Text(f"{job.status}{reason}", _STYLES.get(job.status, "")),
            *format_figures(job, named),
        )
    return table


def list_figure_headings(outcomes: Sequence[JobOutcome]) -> tuple[str, ...]:
    """Return the headings of `format_figures`; the first is the metric, if equal in all jobs."""
    metrics = _collect_metric_names(outcomes)
    named = "metric" if len(metrics) > 1 else next(iter(metrics), "accuracy")
    return (named, "baseline", "speed", "size", "time")


def has_several_metrics(outcomes: Sequence[JobOutcome]) -> bool:
    """Whether the jobs have different metrics."""
    return len(_collect_metric_names(outcomes)) > 1


def _collect_metric_names(outcomes: Sequence[JobOutcome]) -> set[str]:
    return {_get_metric_name(job) for job in outcomes if job.accuracy is not None}


def _get_metric_name(job: JobOutcome) -> str:
    return job.metric or "accuracy"


def format_figures(job: JobOutcome, named: bool = False) -> tuple[str, str, str, str, str]:
    """Format the metric, its baseline, speedup, size and time of a job; dashes if missing.

    The value follows the name of its metric if `named`.
    """
    smaller = f"{job.size / job.baseline_size:.0%}" if job.baseline_size else "–"
    value = formatting.format_number(job.accuracy)
    return (
        f"{_get_metric_name(job)} {value}" if named and job.accuracy is not None else value,
        formatting.format_number(job.baseline_accuracy),
        formatting.format_ratio(job.speedup),
        smaller,
        formatting.format_seconds(job.seconds or None),
    )


def count_by_status(outcomes: Sequence[JobOutcome]) -> str:
    """Return the number of jobs per status as text."""
    counts = {status: sum(job.status is status for job in outcomes) for status in JobStatus}
    finished = sum(job.known for job in outcomes)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    parts += [f"{finished} of them finished before"] if finished else []
    return f"{format_count(len(outcomes), 'job')}: {', '.join(parts)}"
