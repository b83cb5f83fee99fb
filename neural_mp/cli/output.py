"""Output of commands: printing, logging, progress and interruption."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from neural_mp.cli.errors import print_error_document, print_error_line
from neural_mp.cli.interrupts import handle_by_default, handle_interrupts, to_exit_code
from neural_mp.cli.streams import check_written
from neural_mp.core.trial import Trial
from neural_mp.errors import ConfigurationError, ConversionError, NeuralMPError, message_of
from neural_mp.reporting import create_error_console, create_output_console

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel

#: Version of the documents of `tune`, `convert` and `report`; raised if a key changes its meaning
#: or disappears; see docs/cli.md.
SCHEMA = 1

JsonOption = Annotated[bool, typer.Option("--json", help="Print only a JSON document on stdout.")]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Suppress progress and warnings on stderr.")
]
VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        show_default=False,
        help="Log more on stderr; repeat for debug output.",
    ),
]

#: Number of `--verbose` flags → log level; higher numbers use the last level.
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Output:
    """Standard output and standard error of a command; a context manager for its duration.

    Attributes:
        continuation: message if the command ends early: what is kept, and how to continue.
        saved: file or folder that the command has saved.
        interrupted_by: number of the signal of Ctrl-C or SIGTERM; None without.
    """

    def __init__(
        self, as_json: JsonOption = False, quiet: QuietOption = False, verbose: VerboseOption = 0
    ) -> None:
        self.as_json, self.quiet, self.verbose = as_json, quiet, verbose
        self.continuation = ""
        self.saved: Path | None = None
        self.interrupted_by: int | None = None
        self._stack = ExitStack()
        self._is_shown = False

    def __enter__(self) -> Output:
        self._document = sys.stdout
        if self.as_json:
            # The document must not contain output of the user's code.
            self._stack.enter_context(redirect_stdout(sys.stderr))
        self._stack.enter_context(self._logging_to_console())
        self._stack.enter_context(self._noting_interrupts())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self.as_json and error is not None and not self._is_shown:
            self._show_error(error)
        if self.interrupted_by is not None or isinstance(error, KeyboardInterrupt):
            print_error_line(f"interrupted; {self._describe_kept()}")
            raise typer.Exit(to_exit_code(self.interrupted_by or signal.SIGINT)) from None
        if error is None or isinstance(error, typer.Exit):
            self.check_written()
        if self.verbose and isinstance(error, NeuralMPError):
            traceback.print_exception(kind, error, trace)

    def check_written(self) -> None:
        """Check that the output so far was written.

        Raises:
            NeuralMPError: standard output cannot be written, e.g. on a full disk.
            SystemExit: the reader of standard output has closed.
        """
        check_written(self._document, self._describe_kept())

    def _describe_kept(self) -> str:
        saved = "" if self.saved is None else f"saved to {self.saved}"
        return "; ".join(filter(None, (saved, self.continuation))) or "nothing was saved"

    def check_single_format(self, as_csv: bool) -> None:
        """Check that JSON and CSV are not combined.

        Raises:
            ConfigurationError: both were requested.
        """
        if self.as_json and as_csv:
            raise ConfigurationError("--json and --csv exclude each other; give one of them")

    def show_table(self, shown: RenderableType) -> None:
        """Print a table or a text on standard output, unless a JSON document goes there."""
        if not self.as_json:
            create_output_console().print(shown)

    def show_line(self, text: str) -> None:
        """Print an unwrapped text; otherwise as `show_table`."""
        if not self.as_json:
            create_output_console().print(text, markup=False, highlight=False, soft_wrap=True)

    def show_document(self, value: object) -> None:
        """Print the JSON document; numbers that JSON lacks (NaN, Infinity) become null."""
        text = json.dumps(_to_json_value(value), indent=1, allow_nan=False)
        self._is_shown = True
        print(text, file=self._document, flush=True)

    def _show_error(self, error: BaseException) -> None:
        """Print the JSON document of a command that fails, unless standard output is closed."""
        if isinstance(error, typer.Exit):
            return
        with suppress(OSError, ValueError):
            if isinstance(error, KeyboardInterrupt):
                message = f"interrupted; {self._describe_kept()}"
                print_error_document("Interrupted", message, self._document)
            else:
                print_error_document(type(error).__name__, message_of(error), self._document)

    def show_warning(self, message: str) -> None:
        """Print a warning on standard error."""
        if not self.quiet:
            create_error_console().print(
                f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True
            )

    @contextmanager
    def show_progress(self, step: str) -> Iterator[None]:
        """Show a spinner with the name and elapsed time of a step on a terminal."""
        console = create_error_console()
        if self.quiet or not console.is_terminal:
            yield
            return
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False)
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            progress.add_task(step, total=None)
            yield

    @contextmanager
    def _logging_to_console(self) -> Iterator[None]:
        logger, handler = logging.getLogger("neural_mp"), _ToConsole()
        previous = logger.level
        level = logging.ERROR if self.quiet else _LEVELS[min(self.verbose, len(_LEVELS) - 1)]
        logger.addHandler(handler)
        logger.setLevel(level)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(previous)

    @contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        """Record Ctrl-C and SIGTERM, since a search catches the exception and returns its best."""
        owner = os.getpid()

        def note_interrupt(number: int, frame: FrameType | None) -> None:
            if os.getpid() != owner:  # a fork, e.g. of a data loader
                handle_by_default(number)
            self.interrupted_by = number
            raise KeyboardInterrupt

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = handle_interrupts(note_interrupt)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _ToConsole(logging.Handler):
    """Log handler for standard error, above the progress bar if any."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a log line, with its traceback if any."""
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        text = f"{record.levelname.lower()}: {self.format(record)}"
        create_error_console().print(
            text, style=style, markup=False, highlight=False, soft_wrap=True
        )


def _to_json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if callable(getattr(value, "item", None)):  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def emit_result(result: OptimizedModel, output: Output, folder: Path | None) -> None:
    """Print a result, and save it if a folder is set.

    Raises:
        NeuralMPError: the result cannot be saved.
    """
    from neural_mp.reporting import result_tables

    try:
        if folder is not None:
            folder = _save_result(result, folder)
            output.saved = folder
    finally:
        output.show_table(result_tables(result.report, result.met))
    if folder is not None:
        output.show_line(f"saved to {folder}; exact on {result.exact_on}")
    if output.as_json:
        output.show_document(_make_result_document(result, folder))


def _save_result(result: OptimizedModel, path: Path) -> Path:
    """Save a result, as a folder if its framework cannot write such a file; return the path."""
    from neural_mp.api.saved_model import FILE_SUFFIXES

    with disabled_logger("neural_mp.api.optimized_model"):  # the command prints the exact targets
        try:
            result.save(path)
            return path
        except ConversionError as error:
            if path.suffix.lower() not in FILE_SUFFIXES:
                raise
            # The framework of the result is known only now; the result must not be lost.
            folder = path.with_suffix("")
            result.save(folder)
            print_error_line(f"{error}: saved to the folder {str(folder)!r} instead")
            return folder


@contextmanager
def disabled_logger(name: str) -> Iterator[None]:
    """Disable the logger of a module, whose messages the command prints itself."""
    logger = logging.getLogger(name)
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = False


def _make_result_document(result: OptimizedModel, folder: Path | None) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "met": result.met,
        "framework": result.framework,
        "exact_on": result.exact_on,
        "saved_to": folder,
        "report": result.report.to_dict(),
        "trials": [make_trial_document(trial) for trial in result.trials],
        "plan": result.plan.to_dict(),
    }


def make_trial_document(trial: Trial) -> dict[str, Any]:
    """Return the fields of a trial, its speed-up and its number of ops per precision."""
    counts = {str(precision): count for precision, count in trial.plan.counts().items()}
    return {**trial.to_dict(), "speedup": trial.speedup, "counts": counts}
