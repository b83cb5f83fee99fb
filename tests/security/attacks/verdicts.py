"""What comes of an attack: right results or one error of ours; all else is a finding."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from attacks.own_time import TooLongError, communicated, limited

from neural_mp.errors import DataError, NeuralMPError, is_users_own, mark_user_error

logger = logging.getLogger(__name__)

#: Where the code is that is attacked.
REPOSITORY = Path(__file__).resolve().parents[3]


class Verdict(Enum):
    """How one attack ended."""

    RIGHT = "right"
    REFUSED = "refused"
    TRACEBACK = "traceback"
    HANG = "hang"
    EXECUTED = "executed"
    LOST = "lost"
    REPEATED = "repeated"
    WRONG = "wrong"

    @property
    def harmless(self) -> bool:
        """Whether that is one of the two ends that are promised."""
        return self in (Verdict.RIGHT, Verdict.REFUSED)


@dataclass(frozen=True)
class Finding:
    """One attack and its end.

    Attributes:
        family: what kind of attack, such as `hostile files`.
        case: which one.
        verdict: how it ended.
        words: what was said, or seen.
    """

    family: str
    case: str
    verdict: Verdict
    words: str = ""


@dataclass(frozen=True)
class Family:
    """A kind of attack.

    Attributes:
        name: of the kind.
        full: how many attacks the long form makes.
        findings: (how many, an empty folder, a seed) → what came of each.
    """

    name: str
    full: int
    findings: Callable[[int, Path, int], Iterator[Finding]]


def judged(
    family: str,
    case: str,
    call: Callable[[], Any],
    *,
    canary: Path | None = None,
    seconds: float = 30,
) -> Finding:
    """Make a call in this process and judge how it ends.

    Args:
        family: see `Finding`.
        case: see `Finding`.
        call: the attack; it raises `AssertionError` where a result is wrong.
        canary: a file that only code of the attacker's makes.
        seconds: own seconds within which it must end.
    """
    message = ""
    try:
        with limited(seconds):
            call()
        verdict = Verdict.RIGHT
    except TooLongError:
        verdict = Verdict.HANG
    except NeuralMPError as error:
        verdict, message = Verdict.REFUSED, str(error)
    except AssertionError as error:
        verdict, message = Verdict.WRONG, str(error)
    except Exception as error:
        logger.debug("%s: %s", family, case, exc_info=True)
        own = is_users_own(error)
        verdict, message = (Verdict.RIGHT if own else Verdict.TRACEBACK), repr(error)
    if canary is not None and canary.exists():
        verdict = Verdict.EXECUTED
    return Finding(family, case, verdict, message)


def command(*arguments: str) -> list[str]:
    """The `neural-mp` command as a user starts it: by a script, not from the working directory."""
    return [sys.executable, str(Path(__file__).with_name("command.py")), *arguments]


def paths_with(*folders: Path) -> str:
    """`PYTHONPATH` with folders in front."""
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def judged_command(
    family: str,
    case: str,
    arguments: Sequence[str],
    *,
    canary: Path | None = None,
    folder: Path | None = None,
    seconds: float = 120,
) -> Finding:
    """Run `neural-mp` with arguments in a process of its own and judge how it ends.

    Args:
        family: see `Finding`.
        case: see `Finding`.
        arguments: of the command.
        canary: a file that only code of the attacker's makes.
        folder: the working directory.
        seconds: own seconds within which it must end.
    """
    environment = {**os.environ, "PYTHONPATH": paths_with(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command(*arguments),
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        output, errors = communicated(process, seconds)
    except TooLongError:
        verdict, message = Verdict.HANG, ""
    else:
        message = (errors.strip() or output.strip())[-2000:]
        if "Traceback (most recent call last)" in errors or process.returncode < 0:
            verdict = Verdict.TRACEBACK
        else:
            verdict = Verdict.RIGHT if process.returncode == 0 else Verdict.REFUSED
    if canary is not None and canary.exists():
        verdict = Verdict.EXECUTED
    return Finding(family, case, verdict, message)


def check() -> None:
    """Raise `AssertionError` unless every end of a call is judged as what it is."""

    def fails(error: Exception) -> Any:
        raise error

    def loops() -> None:
        while True:
            pass

    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "ran"
        findings = [
            judged("", "", lambda: 1),
            judged("", "", lambda: fails(DataError("no data"))),
            judged("", "", lambda: fails(mark_user_error(KeyError("x")))),
            judged("", "", lambda: fails(KeyError("x"))),
            judged("", "", lambda: fails(AssertionError("1 is not 2"))),
            judged("", "", lambda: time.sleep(5), seconds=0.1),
            judged("", "", loops, seconds=0.1),
            judged("", "", canary.touch, canary=canary),
        ]
    harmless = [Verdict.RIGHT, Verdict.REFUSED, Verdict.RIGHT]
    failures = [Verdict.TRACEBACK, Verdict.WRONG, Verdict.HANG, Verdict.HANG]
    assert [finding.verdict for finding in findings] == [*harmless, *failures, Verdict.EXECUTED]
    assert harmful(findings) == findings[len(harmless) :]


def harmful(findings: Iterable[Finding]) -> list[Finding]:
    """Those of the findings that break a promise."""
    return [finding for finding in findings if not finding.verdict.harmless]


def counts(findings: Iterable[Finding]) -> dict[str, Counter[Verdict]]:
    """Family → how many attacks ended in which way."""
    totals: dict[str, Counter[Verdict]] = {}
    for finding in findings:
        totals.setdefault(finding.family, Counter())[finding.verdict] += 1
    return totals
