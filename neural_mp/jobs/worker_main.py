"""Process of one job: `… FILE FOLDER [--resume] [--trust=MODULE]`.

Standard output carries progress messages, one JSON document per line; output of frameworks and of
the user's code goes to standard error. When standard input closes because the parent process has
ended, the process and all its children end.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError, RunInUseError, message_of
from neural_mp.tuning.job_outcome import RESULT, WORKSPACE, JobStatus, read_outcome
from neural_mp.tuning.listener import Listener

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel

logger = logging.getLogger(__name__)

_TRUST = "--trust="


class _ProgressReporter(Listener):
    """Listener that sends the progress to the parent process."""

    wants_hints = False

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._metric = ""

    def metric(self, name: str, criterion: AccuracyCriterion) -> None:
        """Keep the name of the metric for the trials."""
        self._metric = name

    def phase(self, name: str, total: int | None = None) -> None:
        """Report the start of a phase."""
        self._tell(name)

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """Report a finished trial."""
        from neural_mp.reporting import formatting

        accuracy = formatting.format_accuracy(trial, self._metric)
        self._tell(f"trial {trial.number + 1}: {trial.outcome}, {accuracy}")


def main(file: str, folder: str, resume: bool, trust: tuple[str, ...]) -> int:
    """Run a job, write its outcome to its folder, and return the exit code."""
    from neural_mp.cli.errors import ExitCode, report_error

    faulthandler.enable()
    # Standard output goes to standard error; the parent reads messages from the original.
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end_with_parent()
    directory, started = Path(folder), time.monotonic()
    outcome = read_outcome(directory)
    assert outcome is not None
    code = ExitCode.DONE
    try:
        reporter = _ProgressReporter(lambda m: print(json.dumps(m), file=stream, flush=True))
        result = _tune_file(file, directory, resume, trust, reporter)
        outcome = outcome.ended(result.report, result.met)
    except Exception as error:
        # Any exception is stored as the outcome, so that the other jobs continue.
        logger.debug("the job failed", exc_info=True)
        code = report_error(error)
        message = " ".join(message_of(error).split())
        outcome = replace(
            outcome, status=JobStatus.FAILED, reason=f"{type(error).__name__}: {message}"
        )
    replace(outcome, exit_code=int(code), seconds=time.monotonic() - started).write(directory)
    return int(code)


def _tune_file(
    file: str, directory: Path, resume: bool, trust: tuple[str, ...], listener: Listener
) -> OptimizedModel:
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.config import load_settings

    converter = MixedPrecision(load_settings(file, trust=trust))
    converter.listener = listener
    if not converter.is_set("workspace") and converter.storage is None:
        converter.workspace = directory / WORKSPACE
    converter.resume = converter.resume or resume
    try:
        result = converter()
    except HistoryError as error:
        if not resume or isinstance(error, RunInUseError):
            raise
        converter.resume = False  # killed before its run was created
        result = converter()
    result.save(directory / RESULT)
    return result


def end_with_parent() -> None:
    """End this process and its children when standard input closes."""
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch_parent() -> None:
        while os.read(watched, 1024):
            pass
        if hasattr(os, "killpg"):
            # The process leads a process group that includes its workers.
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()


if __name__ == "__main__":
    from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs

    suppress_startup_logs()
    options = sys.argv[3:]
    trusted = tuple(word.removeprefix(_TRUST) for word in options if word.startswith(_TRUST))
    # Exit without waiting for threads and exit handlers of frameworks.
    code = main(sys.argv[1], sys.argv[2], "--resume" in options, trusted)
    sys.stderr.flush()
    os._exit(code)
