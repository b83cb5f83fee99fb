"""What the exit code of a command says."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why a command ended."""

    DONE = 0
    TARGET_MISSED = 1
    PLAN_BROKEN = 1
    JOB_FAILED = 1
    MISTAKE = 2
    USER_CODE = 3
    FAULT = 4
    INTERRUPTED = 130

    @property
    def words(self) -> str:
        """What it means, for help texts."""
        return _WORDS[self]


_WORDS = {
    ExitCode.DONE: "done",
    ExitCode.TARGET_MISSED: (
        "the accuracy target was missed, an audited plan does not hold, or a job failed"
    ),
    ExitCode.MISTAKE: "a mistake in what was asked for, named in one line",
    ExitCode.USER_CODE: "code of your own (metric, data, model) raised an exception",
    ExitCode.FAULT: "a fault of neural-mp itself",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}


def epilog(*examples: str) -> str:
    """What stands below the help of a command: examples, and the exit codes.

    Args:
        examples: command lines without `neural-mp`.
    """
    codes = "; ".join(f"{code.value} {code.words}" for code in ExitCode)
    lines = [f"Example: neural-mp {example}" for example in examples]
    return "\n\n".join([*lines, f"Exit codes: {codes}."])
