"""Consoles for terminals, pipes and files in any encoding, and the progress of a run in them.

Progress is a progress bar and the latest trials.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.text import Text

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.errors import visible
from neural_mp.reporting import formatting
from neural_mp.reporting.tables import build_trial_table, result_tables
from neural_mp.runs.report import Report
from neural_mp.tuning.listener import Listener, describe_accuracy_target, limit_words

#: Width without a terminal, which fits any table.
_UNLIMITED = 100_000
#: Replacements of characters that an encoding lacks.
_PLAIN = {
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "…": "...",
    "µ": "u",
    "μ": "u",
    "±": "+/-",
    "→": "->",
    "‖": "||",
    "·": "*",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
    "²": "^2",
    "≥": ">=",
    "≤": "<=",
}
_IN_PLAIN_WORDS = "neural_mp.plain"
#: Minimum seconds between two updates, to limit the load of the browser.
_BETWEEN = 0.25
#: Width of a cell's output.
_COLUMNS = 110
_FRAME = (
    "<pre style=\"white-space:pre;overflow-x:auto;line-height:1.2;font-family:Menlo,'DejaVu Sans "
    "Mono',Consolas,monospace\">{code}</pre>"
)


class SafeConsole(Console):
    """Console that prints names from files literally.

    Markup and emoji codes are not interpreted, and control characters, which could manipulate the
    terminal, are printed as their codes.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """Return a text with its replacements, so that its width is known."""
        return super().render_str(visible(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object, with replacements in all its texts."""
        for piece in super().render(renderable, options):
            text, style, control = piece
            yield piece if control else Segment(visible(text), style)

    def on_broken_pipe(self) -> None:
        """Print nothing from now on: a run must not end because nobody reads its progress."""
        self.quiet = True


def create_output_console() -> Console:
    """Return a console for results on the current standard output."""
    return _build_console(stderr=False)


def create_error_console() -> Console:
    """Return a console for progress, warnings and errors on the current standard error."""
    return _build_console(stderr=True)


def _build_console(*, stderr: bool) -> SafeConsole:
    stream = sys.stderr if stderr else sys.stdout
    _make_printable(stream)
    # Checked in advance: while TensorFlow is imported, standard error is redirected to a pipe.
    on_terminal = stream.isatty()
    coloured = bool(os.environ.get("FORCE_COLOR")) and not on_terminal
    return SafeConsole(
        # Kept open, so that a progress bar still updates while framework output is captured.
        file=stream,
        stderr=stderr,
        # `FORCE_COLOR` requests colours, not progress bars in a file.
        force_terminal=on_terminal,
        color_system="standard" if coloured else "auto",
        # Output for other programs must not be wrapped.
        width=None if on_terminal else _UNLIMITED,
    )


def _make_printable(stream: object) -> None:
    """Let a stream print the nearest available character for those its encoding lacks."""
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower().replace("-", "")
    if encoding.startswith("utf") or not hasattr(stream, "reconfigure"):
        return
    codecs.register_error(_IN_PLAIN_WORDS, _replace_unencodable)
    stream.reconfigure(errors=_IN_PLAIN_WORDS)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in missing), error.end


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "ipykernel" not in sys.modules:
        return False
    from IPython import get_ipython

    return get_ipython() is not None


class NotebookLive:
    """Live display in a cell's output, without widgets; `render` returns the current content."""

    def __init__(self, render: Callable[[], RenderableType]) -> None:
        self._render = render
        self._handle: Any = None
        self._drawn = 0.0

    def update(self) -> None:
        """Redraw, unless the last update is too recent."""
        now = time.monotonic()
        if now - self._drawn >= _BETWEEN:
            self._drawn = now
            self.draw_content(self._render())

    def draw_content(self, shown: RenderableType) -> None:
        """Replace the displayed content."""
        from IPython.display import HTML, display

        html = HTML(render_terminal_html(shown))
        if self._handle is None:
            self._handle = display(html, display_id=True)
        else:
            self._handle.update(html)


def render_terminal_html(shown: RenderableType) -> str:
    """Return terminal output as HTML with inline styles."""
    console = SafeConsole(
        record=True, file=io.StringIO(), width=_COLUMNS, force_jupyter=False, color_system="256"
    )
    console.print(shown)
    return console.export_html(inline_styles=True, code_format=_FRAME)


#: Number of latest trials shown during a run.
_SHOWN = 15


class LiveListener(Listener):
    """Listener that shows a run: on a terminal or in a notebook cell, in one place that it updates.

    Elsewhere, it prints one line per trial.

    Args:
        console: destination; default: the cell of a notebook, else standard error, so that output
            can be piped.
        summary: whether to show the result tables at the end.
    """

    def __init__(self, console: Console | None = None, summary: bool = True) -> None:
        self._summary = summary
        self.console = console or create_error_console()
        self._rows: list[tuple[Trial, float | None]] = []
        self._baseline, self._each, self._metric, self._limit = "", "", ("", ""), ""
        self._source = Precision.FP32.name
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("Starting", total=None)
        self._live: Live | None = None
        self._cell: NotebookLive | None = None
        if console is None and is_notebook():
            self._cell = NotebookLive(self.render_display)
        elif self.console.is_terminal:
            self._live = Live(self.render_display(), console=self.console, transient=True)
            self._live.start()

    def phase(self, name: str, total: int | None = None) -> None:
        """Restart the progress bar."""
        self._progress.reset(self._task, total=total, description=name)
        self._update_display()

    def step(self) -> None:
        """Advance the progress bar."""
        self._progress.advance(self._task)
        self._update_display()

    def source(self, name: str) -> None:
        """Name the given model by its precision."""
        self._source = name

    def metric(self, name: str, criterion: AccuracyCriterion) -> None:
        """Show the name of the metric and the tolerance with the target."""
        self._metric = name, criterion.words(self._source)

    def metrics(self, baseline: Mapping[str, float], targets: Mapping[str, float]) -> None:
        """Show each metric's value and target instead of a score."""
        self._each = "; ".join(
            f"{name}: {self._source} {formatting.format_number(value)}, "
            f"target {formatting.format_number(targets[name])}"
            for name, value in baseline.items()
        )

    def baseline(self, accuracy: float, target: float) -> None:
        """Show the accuracy of the given model and the target."""
        name, tolerance = self._metric
        self._baseline = self._each or describe_accuracy_target(
            name, self._source, accuracy, target, tolerance
        )
        if self._prints_lines:
            self.console.print(self._baseline)
        self._update_display()

    def limit(self, seconds: float, effort: str) -> None:
        """Show the limit of the rest of the run."""
        self._limit = limit_words(seconds, effort)
        if self._prints_lines:
            self.console.print(self._limit)
        self._update_display()

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """Add a row."""
        self._rows.append((trial, speedup))
        if self._prints_lines:
            accuracy = formatting.format_accuracy(trial, self._metric[0])
            self.console.print(
                f"trial {trial.number + 1}: {trial.outcome}, {accuracy}, {trial.plan!r}"
            )
        self._update_display()

    def close(self) -> None:
        """Leave the final table of trials."""
        if self._cell is not None:
            self._cell.draw_content(self.trials())
        elif self._live is not None:
            self._live.stop()
            self._live = None
            if self._rows:
                self.console.print(self.trials())

    def result(self, report: Report, met: bool | None) -> None:
        """Show the tables of the result."""
        if not self._summary:
            return
        tables = result_tables(report, met)
        if self._cell is not None:
            self._cell.draw_content(Group(self.trials(), tables))
        else:
            self.console.print(tables)

    def trials(self) -> RenderableType:
        """Return a table of the trials so far; without trials, the baseline."""
        return build_trial_table(self._rows, self._baseline) if self._rows else Text(self._baseline)

    def render_display(self) -> Group:
        """Return the current display: the latest trials and the progress bar."""
        table = build_trial_table(self._rows[-_SHOWN:]) if self._rows else Text("")
        lines = [Text(line) for line in (self._baseline, self._limit) if line]
        return Group(*lines, table, self._progress)

    @property
    def _prints_lines(self) -> bool:
        return self._live is None and self._cell is None

    def _update_display(self) -> None:
        if self._cell is not None:
            self._cell.update()
        elif self._live is not None:
            self._live.update(self.render_display())


class NotebookListener(LiveListener):
    """Listener that shows a run in a notebook cell, without the tables of the result."""

    def __init__(self) -> None:
        super().__init__(summary=False)
