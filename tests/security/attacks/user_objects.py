"""What users hand over and what does not fit: models, loaders, metrics, functions.

Every case ends in a right result, in one error of ours that names what was received before the
first trial, or in the user's own exception as it was raised.
"""

from __future__ import annotations

import random
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from attacks.own_time import limited
from attacks.users_functions import FUNCTIONS
from attacks.users_loaders import LOADERS
from attacks.users_metrics import METRICS
from attacks.users_models import MODELS
from attacks.users_ways import Comes, Given, Own, Refused, Right
from attacks.verdicts import Family, Finding, Verdict

from neural_mp import MixedPrecision, NeuralMPError
from neural_mp.errors import is_users_own
from neural_mp.tuning.listener import Listener

NAME = "user objects"


class Trials(Listener):
    """Counts the trials of a run."""

    begun = 0

    def phase(self, name: str, total: int | None = None) -> None:
        self.begun += name.startswith("Trial")


@dataclass(frozen=True)
class Case:
    """One thing handed over.

    Attributes:
        name: of it.
        set_up: sets one option of a run that has all others right.
        end: how the run is to end.
    """

    name: str
    set_up: Callable[[Given], None]
    end: Comes


def cases() -> list[Case]:
    """All of them, in a fixed order."""
    kinds = {"model": MODELS, "loader": LOADERS, "metric": METRICS, "function": FUNCTIONS}
    return [
        Case(f"{kind}: {name}", set_up, end)
        for kind, objects in kinds.items()
        for name, (set_up, end) in objects.items()
    ]


def finding(case: Case, folder: Path) -> Finding:
    """Hand it over, and judge the end."""
    trials = Trials()
    converter = MixedPrecision(workspace=folder, listener=trials, precisions="int8")
    run = Given(converter)
    run.set_up_rightly()
    case.set_up(run)
    verdict, message = Verdict.RIGHT, ""
    try:
        with limited(60):
            result = converter()
    except NeuralMPError as error:
        verdict, message = _of_ours(case.end, error, trials.begun)
    except BaseException as error:  # noqa: BLE001 (SystemExit and KeyboardInterrupt are cases)
        verdict, message = _of_theirs(case.end, error)
    else:
        if not isinstance(case.end, Right):
            verdict, message = Verdict.WRONG, f"no error; {result.report.accuracy}"
        elif case.end.trials and not trials.begun:
            verdict, message = Verdict.WRONG, "no trial was made"
    return Finding(NAME, case.name, verdict, message)


def _of_ours(end: Comes, error: NeuralMPError, trials: int) -> tuple[Verdict, str]:
    if isinstance(end, Own) and isinstance(error, end.kind):
        return _of_theirs(end, error)
    message = f"{type(error).__name__}: {error}"
    if not isinstance(end, Refused) or not re.search(end.words, message, re.DOTALL):
        return Verdict.WRONG, message
    if trials > end.trials:
        return Verdict.WRONG, f"after {trials} trials: {message}"
    return Verdict.REFUSED, message


def _of_theirs(end: Comes, error: BaseException) -> tuple[Verdict, str]:
    """Whether an exception is the user's, and as it was raised."""
    message = f"{error!r}"
    if not isinstance(end, Own) or type(error) is not end.kind or str(error) != end.message:
        return Verdict.TRACEBACK, message + "".join(traceback.format_tb(error.__traceback__)[-3:])
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if end.function not in frames:
        return Verdict.WRONG, f"{message}: its traceback has lost {end.function}: {frames}"
    if end.cause is not None and not isinstance(error.__cause__, end.cause):
        return Verdict.WRONG, f"{message}: its cause is {error.__cause__!r}"
    if end.note and end.note not in getattr(error, "__notes__", ()):
        return Verdict.WRONG, f"{message}: its note is lost"
    if issubclass(end.kind, Exception) and not is_users_own(error):
        return Verdict.WRONG, f"{message}: it is not known as the user's"
    return Verdict.RIGHT, message


def findings(count: int, folder: Path, seed: int) -> Iterator[Finding]:
    """What comes of so many cases; of all of them in the long form."""
    chosen = cases()
    random.Random(seed).shuffle(chosen)
    for number in range(count):
        yield finding(chosen[number % len(chosen)], folder / str(number))


USER_OBJECTS = Family(NAME, len(cases()), findings)
