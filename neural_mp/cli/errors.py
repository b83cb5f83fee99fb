"""Error messages and exit codes for exceptions that leave a command."""

from __future__ import annotations

import json
import sysconfig
import traceback
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import TextIO

import neural_mp
from neural_mp.errors import NeuralMPError, is_users_own
from neural_mp.reporting import create_error_console


class ExitCode(IntEnum):
    """Exit code of a command."""

    DONE = 0
    TARGET_MISSED = 1
    PLAN_BROKEN = 1
    JOB_FAILED = 1
    MISTAKE = 2
    USER_CODE = 3
    FAULT = 4
    NOT_FASTER = 5
    INTERRUPTED = 130
    TERMINATED = 143

    @property
    def exit_meaning(self) -> str:
        """Meaning of the exit code, for help texts."""
        return _WORDS[self]


_WORDS = {
    ExitCode.DONE: "done",
    ExitCode.TARGET_MISSED: (
        "the accuracy target was missed, an audited plan does not hold, or a job failed"
    ),
    ExitCode.MISTAKE: "invalid input, described in one line",
    ExitCode.USER_CODE: "your own code (metric, data, model) raised an exception",
    ExitCode.FAULT: "an internal error of neural-mp",
    ExitCode.NOT_FASTER: "the accuracy target was met, but by no plan faster than FP32",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
    ExitCode.TERMINATED: "interrupted by SIGTERM",
}


def help_epilog(*examples: str) -> str:
    """Return the end of a command's help: examples (without `neural-mp`) and exit codes."""
    codes = "; ".join(f"{code.value} {code.exit_meaning}" for code in ExitCode)
    lines = [f"Example: neural-mp {example}" for example in examples]
    return "\n\n".join([*lines, f"Exit codes: {codes}."])


_PACKAGE = Path(neural_mp.__file__).parent
#: Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def report_error(error: Exception) -> ExitCode:
    """Print an error, a user mistake as one line, others with a traceback; return the exit code."""
    if isinstance(error, NeuralMPError) and not is_users_own(error):
        print_error_line(f"{type(error).__name__}: {error}")
        return ExitCode.MISTAKE
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    location = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    users = bool(own) or is_users_own(error)
    trace = _from_users_code(error.__traceback__) if users else error.__traceback__
    traceback.print_exception(type(error), error, trace)
    if users:
        print_error_line(f"the exception comes from your own code{location}, not from neural-mp")
        return ExitCode.USER_CODE
    print_error_line("internal error of neural-mp; please report it with the lines above")
    return ExitCode.FAULT


def print_error_document(kind: str, message: str, stream: TextIO) -> None:
    """Print an error as a JSON object with the key `error`, for commands with `--json`."""
    document = {"error": {"type": kind, "message": message}}
    print(json.dumps(document, indent=1), file=stream, flush=True)


def print_error_line(message: str) -> None:
    """Print a text as one unwrapped line on standard error."""
    create_error_console().print(
        message, style="red", markup=False, highlight=False, soft_wrap=True
    )


def _is_users(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or any(part in _INSTALLED for part in path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in (_PACKAGE, *_LIBRARIES))


def _from_users_code(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback that starts at the first frame in the user's code."""
    begin = trace
    while begin is not None and not _is_users(begin.tb_frame.f_code.co_filename):
        begin = begin.tb_next
    return begin or trace
