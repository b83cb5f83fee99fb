"""The process of one job: `… FILE FOLDER [--resume] [--trust=MODULE]`.

What it tells of itself goes to standard output, a JSON document a line; what frameworks and the
user's own code print goes where standard error goes. It ends, with all its children, when its
standard input does: with the process that started it.
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
from typing import TYPE_CHECKING, Any

from neural_mp.core.trial import Trial
from neural_mp.errors import HistoryError, RunInUseError, message_of
from neural_mp.tuning.job_outcome import RESULT, WORKSPACE, JobStatus, read_outcome
from neural_mp.tuning.listener import Listener

if TYPE_CHECKING:
    from neural_mp.api.optimized_model import OptimizedModel

logger = logging.getLogger(__name__)


_TRUST = "--trust="


class _ProgressReporter(Listener):
    """Tells the process that started this one how far the job is."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._trials = tell, 0

    def phase(self, name: str, total: int | None = None) -> None:
        """What goes on."""
        self._tell(name)

    def trial(self, trial: Trial, speedup: float | None) -> None:
        """One more was tried."""
        from neural_mp.reporting import formatting

        self._trials += 1
        self._tell(f"trial {self._trials}: {trial.outcome}, {formatting.accuracy(trial)}")


def main(file: str, folder: str, resume: bool, trust: tuple[str, ...]) -> int:
    """Do a job, and keep what came of it in its folder.

    Returns:
        The exit code.
    """
    from neural_mp.cli.errors import ExitCode, reported

    faulthandler.enable()
    tell = _own_output()
    _end_with_parent()
    place, started = Path(folder), time.monotonic()
    outcome = read_outcome(place)
    assert outcome is not None
    code = ExitCode.DONE
    try:
        result = _tuned(file, place, resume, trust, _ProgressReporter(tell))
        outcome = outcome.ended(result.report, result.met)
    except Exception as error:
        # Whatever ends a job: it is told with its reason, and the other jobs go on.
        logger.debug("the job failed", exc_info=True)
        code = reported(error)
        said = " ".join(message_of(error).split())
        outcome = replace(
            outcome, status=JobStatus.FAILED, reason=f"{type(error).__name__}: {said}"
        )
    replace(outcome, exit_code=int(code), seconds=time.monotonic() - started).write(place)
    return int(code)


def _tuned(
    file: str, place: Path, resume: bool, trust: tuple[str, ...], listener: Listener
) -> OptimizedModel:
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.config import load_settings

    settings = load_settings(file, trust=trust)
    converter = MixedPrecision(settings)
    converter.listener = listener
    if settings.tuning.workspace is None and settings.tuning.storage is None:
        converter.workspace = place / WORKSPACE
    converter.resume = converter.resume or resume
    try:
        result = converter()
    except HistoryError as error:
        if not resume or isinstance(error, RunInUseError):
            raise
        converter.resume = False  # it was killed before it had a run
        result = converter()
    result.save(place / RESULT)
    return result


def _own_output() -> Callable[[str], None]:
    """Let standard output lead where standard error leads; what tells on the former."""
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(words: str) -> None:
        print(json.dumps(words), file=stream, flush=True)

    return tell


def _end_with_parent() -> None:
    watched = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        while os.read(watched, 1024):
            pass
        if hasattr(os, "killpg"):
            # The process leads a group of its own, in which are the workers that it started.
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _arguments(given: list[str]) -> tuple[Any, ...]:
    trust = (word.removeprefix(_TRUST) for word in given[2:] if word.startswith(_TRUST))
    return given[0], given[1], "--resume" in given[2:], tuple(trust)


if __name__ == "__main__":
    from neural_mp.adaptors.tensorflow.log_suppression import suppress_startup_logs

    suppress_startup_logs()
    # At once, whatever threads and handlers of frameworks would still have to say.
    code = main(*_arguments(sys.argv[1:]))
    sys.stderr.flush()
    os._exit(code)
